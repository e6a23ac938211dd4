# openmsa_options: warnings and sanitizers, for our own targets only (never exported).
add_library(openmsa_options INTERFACE)
target_compile_options(openmsa_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wno-psabi>)
if(OPENMSA_WERROR)
  # Warnings that gcc derives from what the optimiser left over come and go with its version: shown, but not fatal.
  target_compile_options(openmsa_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-error=array-bounds;-Wno-error=maybe-uninitialized;-Wno-error=stringop-overflow>)
endif()
if(OPENMSA_SANITIZE)
  # For the whole build, not through the target: a program of which only a part is instrumented reports false faults. Lines are all
  # that reports name; where variables live as well takes gcc a third of the time that it needs for instrumented SIMD code.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${OPENMSA_SANITIZE}> $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
    $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all> $<$<COMPILE_LANGUAGE:CXX>:-g1>)
  add_link_options(-fsanitize=${OPENMSA_SANITIZE})
endif()
