// 2^x for softmax, in fp32.
#if defined(OPENMSA_CPU_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPENMSA_CPU_SOFTMAX_INL_H_
#undef OPENMSA_CPU_SOFTMAX_INL_H_
#else
#define OPENMSA_CPU_SOFTMAX_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// 2^x for x <= 0 (a few units above 0 are fine too), relative error below 1.5e-7; 2^0 is exactly 1. Results below 2^-126, hence
// also 2^-inf, are 0; NaN stays NaN. Highway's Exp costs a two-part ln 2 and a division by rounding; the scores here come scaled
// by log2(e) for free, inside the multiply-add that subtracts the maximum.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp2_nonpositive(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  // Adding 1.5 * 2^23 rounds to an integer n, which then stands in the low bits; 127 more makes it the exponent field of 2^n.
  const V shift = hn::Set(d, 12582912.0f + 127.0f);
  const V shifted = hn::Add(x, shift);
  const V fraction = hn::Sub(x, hn::Sub(shifted, shift));  // in [-1/2, 1/2], exact
  // Minimax fit of 2^f with the constant term held at 1; relative error 9.2e-8 before rounding.
  V poly = hn::Set(d, 0.0013264735462144017f);
  poly = hn::MulAdd(poly, fraction, hn::Set(d, 0.00967151764780283f));
  poly = hn::MulAdd(poly, fraction, hn::Set(d, 0.05550733953714371f));
  poly = hn::MulAdd(poly, fraction, hn::Set(d, 0.24022242426872253f));
  poly = hn::MulAdd(poly, fraction, hn::Set(d, 0.6931470036506653f));
  poly = hn::MulAdd(poly, fraction, hn::Set(d, 1.0f));
  const V power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, shifted)));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -126.0f)), hn::Mul(poly, power));
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();
#endif  // OPENMSA_CPU_SOFTMAX_INL_H_
