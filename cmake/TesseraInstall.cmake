# `cmake --install`: the command, the headers, the libraries, and the package that makes find_package(tessera) work.

include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
foreach(name base layout format checkpoint core)
  set_target_properties(tessera_${name} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS tessera_${name} EXPORT tessera)
endforeach()
install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT tessera NAMESPACE tessera:: FILE tesseraTargets.cmake DESTINATION ${package_dir})
if(TESSERA_TORCH)
  foreach(name torch comm tensor state fsdp)
    set_target_properties(tessera_${name} PROPERTIES EXPORT_NAME ${name})
    install(TARGETS tessera_${name} EXPORT tesseraTorch)
  endforeach()
  install(EXPORT tesseraTorch NAMESPACE tessera:: FILE tesseraTorchTargets.cmake DESTINATION ${package_dir})
endif()
configure_package_config_file(cmake/tesseraConfig.cmake.in ${CMAKE_BINARY_DIR}/cmake/tesseraConfig.cmake
                              INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/cmake/tesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/cmake/tesseraConfig.cmake ${CMAKE_BINARY_DIR}/cmake/tesseraConfigVersion.cmake
              cmake/FindISAL.cmake
        DESTINATION ${package_dir})
