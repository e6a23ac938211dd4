# openmsa_options: warnings and sanitizers, for our own targets only (never exported).
add_library(openmsa_options INTERFACE)
target_compile_options(openmsa_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wno-psabi>)
if(OPENMSA_WERROR)
  target_compile_options(openmsa_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(OPENMSA_SANITIZE)
  # For the whole build, not through the target: a program of which only a part is instrumented reports false faults.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${OPENMSA_SANITIZE}> $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
    $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>)
  add_link_options(-fsanitize=${OPENMSA_SANITIZE})
endif()
