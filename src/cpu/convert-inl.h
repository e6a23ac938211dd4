// Storage types to and from fp32, whole vectors at a time. Compiled once per SIMD target; see targets.hpp.
#if defined(OPENMSA_CPU_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPENMSA_CPU_CONVERT_INL_H_
#undef OPENMSA_CPU_CONVERT_INL_H_
#else
#define OPENMSA_CPU_CONVERT_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "openmsa/tensor.hpp"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Whether the target converts f16 by an instruction, so that Highway's operations can be used.
#undef OPENMSA_F16_IN_HARDWARE
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_NEON
#define OPENMSA_F16_IN_HARDWARE 1
#else
#define OPENMSA_F16_IN_HARDWARE 0
#endif

// fp32 of f16 bits.
template <class D>
HWY_INLINE hn::Vec<D> promote_f16(D d, hn::Vec<hn::Rebind<std::uint16_t, D>> bits16) {
#if OPENMSA_F16_IN_HARDWARE
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::BitCast(d16, bits16));
#else
  // Highway 1.0.3 reads infinity and NaN as numbers here; this is openmsa/half.hpp's conversion.
  const hn::Rebind<std::uint32_t, D> d32;
  const auto bits = hn::PromoteTo(d32, bits16);
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(d32, 0x8000u)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(bits, hn::Set(d32, 0x7fffu)));
  const auto exponent = hn::Set(d32, 0x0f800000u);
  const auto finite = hn::BitCast(d32, hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 0x1p112f)));
  const auto special = hn::Or(magnitude, hn::Set(d32, 0x7f800000u));
  return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(hn::Eq(hn::And(magnitude, exponent), exponent), special, finite)));
#endif
}

// Elements i .. i+Lanes(d)-1 of a row in storage type kType.
template <DType kType, class D>
HWY_INLINE hn::Vec<D> load_f32(D d, const std::byte* row, std::size_t i) {
  if constexpr (kType == DType::kF32) {
    return hn::LoadU(d, reinterpret_cast<const float*>(row) + i);
  } else {
    const hn::Rebind<std::uint16_t, D> d16;
    const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(row) + i);
    if constexpr (kType == DType::kBF16) {
      const hn::Rebind<std::uint32_t, D> d32;
      return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
    } else {
      static_assert(kType == DType::kF16);
      return promote_f16(d, bits);
    }
  }
}

// bf16 and f16 bits in the low halves of 32-bit lanes, as openmsa/half.hpp defines the conversions (nearest even, NaN kept quiet).
// Highway 1.0.3 truncates on bf16, and on f16 where the processor has no instruction for it.
template <class D>
HWY_INLINE auto bf16_bits(D /*d*/, hn::Vec<D> v) {
  const hn::Rebind<std::uint32_t, D> du;
  const auto u = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1u));
  const auto rounded = hn::Add(u, hn::Add(odd, hn::Set(du, 0x7fffu)));
  const auto quiet = hn::Or(u, hn::Set(du, 0x400000u));
  return hn::ShiftRight<16>(hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded));
}

template <class D>
HWY_INLINE auto f16_bits(D d, hn::Vec<D> v) {
  const hn::Rebind<std::uint32_t, D> du;
  const hn::Rebind<std::int32_t, D> di;
  const auto u = hn::BitCast(du, v);
  const auto magnitude = hn::And(u, hn::Set(du, 0x7fffffffu));
  const auto signed_magnitude = hn::BitCast(di, magnitude);
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto normal = hn::ShiftRight<13>(hn::Add(hn::Sub(magnitude, hn::Set(du, 0x38000000u)), hn::Add(odd, hn::Set(du, 0xfffu))));
  const auto subnormal = hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f))), hn::Set(du, 0x3f000000u));
  const auto nan = hn::Or(hn::Set(du, 0x7e00u), hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 0x3ffu)));
  auto half = hn::IfThenElse(hn::RebindMask(du, hn::Lt(signed_magnitude, hn::Set(di, 0x38800000))), subnormal, normal);
  half = hn::IfThenElse(hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(di, 0x477fefff))), hn::Set(du, 0x7c00u), half);
  half = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), nan, half);
  return hn::Or(half, hn::And(hn::ShiftRight<16>(u), hn::Set(du, 0x8000u)));
}

template <DType kType, class D>
HWY_INLINE void store_f32(D d, hn::Vec<D> v, std::byte* row, std::size_t i) {
  if constexpr (kType == DType::kF32) {
    hn::StoreU(v, d, reinterpret_cast<float*>(row) + i);
  } else {
    const hn::Rebind<std::uint16_t, D> d16;
    auto* out = reinterpret_cast<std::uint16_t*>(row) + i;
    if constexpr (kType == DType::kBF16) {
      hn::StoreU(hn::TruncateTo(d16, bf16_bits(d, v)), d16, out);
    } else {
      static_assert(kType == DType::kF16);
#if OPENMSA_F16_IN_HARDWARE
      hn::StoreU(hn::BitCast(d16, hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v)), d16, out);
#else
      hn::StoreU(hn::TruncateTo(d16, f16_bits(d, v)), d16, out);
#endif
    }
  }
}

// Calls function(std::integral_constant<DType, dtype>) for a storage type.
template <class Function>
HWY_INLINE void with_storage_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kBF16: return function(std::integral_constant<DType, DType::kBF16>{});
    case DType::kF16: return function(std::integral_constant<DType, DType::kF16>{});
    default: return function(std::integral_constant<DType, DType::kF32>{});
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();
#endif  // OPENMSA_CPU_CONVERT_INL_H_
