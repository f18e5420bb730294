# `cmake --install`: the command, the headers, the libraries, and what find_package(tessera) and pkg-config read.

include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
set(core_modules base layout format checkpoint)
set(torch_modules comm tensor state fsdp)
set(modules ${core_modules})
if(TESSERA_TORCH)
  set_target_properties(tessera_torch PROPERTIES EXPORT_NAME libtorch)
endif()
# Tests link the shared libraries, also where they are not installed.
if(TESSERA_SHARED OR (TESSERA_TESTS AND NOT TESSERA_SANITIZE))
  include(TesseraShared)
endif()
if(NOT TESSERA_SHARED)
  foreach(name ${core_modules} core)
    set_target_properties(tessera_${name} PROPERTIES EXPORT_NAME ${name})
    install(TARGETS tessera_${name} EXPORT tessera)
  endforeach()
  if(TESSERA_TORCH)
    set_target_properties(tessera_torch_modules PROPERTIES EXPORT_NAME torch)
    install(TARGETS tessera_torch tessera_torch_modules EXPORT tesseraTorch)
    foreach(name ${torch_modules})
      set_target_properties(tessera_${name} PROPERTIES EXPORT_NAME ${name})
      install(TARGETS tessera_${name} EXPORT tesseraTorch)
    endforeach()
  endif()
endif()

# The C interface. Its library holds what it needs of the modules.
if(TARGET tessera_c_shared)
  install(TARGETS tessera_c_shared EXPORT tessera)
endif()
install(FILES include/tessera/c/tessera.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera/c COMPONENT headers)

# Headers: those of the modules that are installed, without what only tessera's own modules include.
if(TESSERA_TORCH)
  list(APPEND modules ${torch_modules})
  install(EXPORT tesseraTorch NAMESPACE tessera:: FILE tesseraTorchTargets.cmake DESTINATION ${package_dir})
  install(FILES cmake/TesseraCudaRuntime.cmake cmake/clang_libtorch_1_13.h DESTINATION ${package_dir})
endif()
install(EXPORT tessera NAMESPACE tessera:: FILE tesseraTargets.cmake DESTINATION ${package_dir})
foreach(module ${modules})
  install(DIRECTORY include/tessera/${module} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera COMPONENT headers
          PATTERN internal EXCLUDE)
endforeach()
install(FILES ${PROJECT_BINARY_DIR}/include/tessera/version.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera COMPONENT headers)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
# The command has its maps within it; these are to be read, and to begin maps of one's own from.
install(DIRECTORY assets/maps DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera)
# Of what the command prints and reads.
install(DIRECTORY docs/json/ DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera/schemas FILES_MATCHING PATTERN "*.schema.json")
install(FILES docs/formats/tensor_map.schema.json DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera/schemas)

configure_package_config_file(cmake/tesseraConfig.cmake.in cmake/tesseraConfig.cmake
                              INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(cmake/tesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cmake/tesseraConfig.cmake ${PROJECT_BINARY_DIR}/cmake/tesseraConfigVersion.cmake
              cmake/FindISAL.cmake cmake/FindRE2.cmake cmake/FindZstd.cmake
        DESTINATION ${package_dir})

# LibTorch has no pkg-config file, so only the torch-free library can have one. Paths are relative to the file, for an
# install with another prefix than the configured one.
file(RELATIVE_PATH prefix_of_pc /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" prefix_of_pc "${prefix_of_pc}")
if(TESSERA_SHARED)
  set(pc_requires "fmt nlohmann_json")
  set(pc_libs -ltessera_core)
else()
  set(pc_requires "fmt nlohmann_json zlib libisal")
  if(Zstd_FOUND)
    string(APPEND pc_requires " libzstd")
  endif()
  if(RE2_FOUND)
    string(APPEND pc_requires " re2")
  endif()
  set(pc_libs "-ltessera_checkpoint -ltessera_format -ltessera_layout -ltessera_base -pthread")
endif()
configure_file(cmake/tessera-core.pc.in tessera-core.pc @ONLY)
configure_file(cmake/tessera.pc.in tessera.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tessera-core.pc ${PROJECT_BINARY_DIR}/tessera.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
