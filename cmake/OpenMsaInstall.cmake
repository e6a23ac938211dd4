# Install and export: find_package(OpenMSA), pkg-config openmsa. Tested by tests/install.
include(CMakePackageConfigHelpers)

set(_openmsa_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/OpenMSA")
get_target_property(_openmsa_type openmsa TYPE)
if(_openmsa_type STREQUAL "STATIC_LIBRARY")
  set(OPENMSA_INSTALLED_STATIC ON)   # then whoever links openmsa also links what it uses
else()
  set(OPENMSA_INSTALLED_STATIC OFF)
endif()

install(TARGETS openmsa EXPORT OpenMSATargets
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT openmsa
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT openmsa
  RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT openmsa)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/openmsa" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT openmsa
  FILES_MATCHING PATTERN "*.hpp")
install(EXPORT OpenMSATargets NAMESPACE OpenMSA:: DESTINATION "${_openmsa_cmake_dir}" COMPONENT openmsa)

configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/OpenMSAConfig.cmake.in" "${PROJECT_BINARY_DIR}/OpenMSAConfig.cmake"
  INSTALL_DESTINATION "${_openmsa_cmake_dir}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/OpenMSAConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
# The consumer looks for Highway the way we did.
install(FILES "${PROJECT_BINARY_DIR}/OpenMSAConfig.cmake" "${PROJECT_BINARY_DIR}/OpenMSAConfigVersion.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/OpenMsaHighway.cmake"
  DESTINATION "${_openmsa_cmake_dir}" COMPONENT openmsa)

# pkg-config. Where only libopenmsa.a is installed, what it uses must be on everybody's link line, so that plain
# `pkg-config --libs openmsa` links, with or without --static.
set(_openmsa_pc_libs "-pthread")
if(OPENMSA_HAVE_CUDA)
  string(APPEND _openmsa_pc_libs " ${CUDA_cudart_static_LIBRARY} -ldl -lrt")
endif()
if(OPENMSA_INSTALLED_STATIC)
  set(OPENMSA_PC_DEPENDENCIES "Requires: libhwy\nLibs: -L\${libdir} -lopenmsa ${_openmsa_pc_libs} -lstdc++")
else()
  set(OPENMSA_PC_DEPENDENCIES "Requires.private: libhwy\nLibs: -L\${libdir} -lopenmsa\nLibs.private: ${_openmsa_pc_libs}")
endif()
# Relative to the .pc file where the layout allows it, so that an installed tree can be moved.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(OPENMSA_PC_PREFIX "${CMAKE_INSTALL_PREFIX}")
  set(OPENMSA_PC_LIBDIR "${CMAKE_INSTALL_FULL_LIBDIR}")
  set(OPENMSA_PC_INCLUDEDIR "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
else()
  file(RELATIVE_PATH _openmsa_up "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
  string(REGEX REPLACE "/$" "" _openmsa_up "${_openmsa_up}")
  set(OPENMSA_PC_PREFIX "\${pcfiledir}/${_openmsa_up}")
  set(OPENMSA_PC_LIBDIR "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  set(OPENMSA_PC_INCLUDEDIR "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
configure_file("${CMAKE_CURRENT_LIST_DIR}/openmsa.pc.in" "${PROJECT_BINARY_DIR}/openmsa.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/openmsa.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT openmsa)
