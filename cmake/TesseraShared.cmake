# TESSERA_SHARED: libtessera_core.so, the torch-free modules, and libtessera_torch.so, those on LibTorch. They are made of
# the objects of the static libraries, and installed in their place. The name libtessera is kept for a C interface.

set(exports ${PROJECT_SOURCE_DIR}/cmake/exports.map)
function(tessera_shared_library name)
  cmake_parse_arguments(ARG "" "" "MODULES;LINKS;PRIVATE_LINKS" ${ARGN})
  foreach(module ${ARG_MODULES})
    list(APPEND objects $<TARGET_OBJECTS:tessera_${module}>)
  endforeach()
  add_library(tessera_${name}_shared SHARED ${objects})
  set_target_properties(tessera_${name}_shared PROPERTIES
    OUTPUT_NAME tessera_${name} EXPORT_NAME ${name} LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR} LINK_DEPENDS ${exports}
    INSTALL_RPATH "$ORIGIN") # libtessera_torch.so finds libtessera_core.so beside it, also for a program that does not link that
  target_compile_features(tessera_${name}_shared PUBLIC cxx_std_20)
  target_include_directories(tessera_${name}_shared INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_options(tessera_${name}_shared PRIVATE -Wl,--version-script=${exports} -Wl,--no-undefined)
  target_link_libraries(tessera_${name}_shared PUBLIC ${ARG_LINKS} PRIVATE ${ARG_PRIVATE_LINKS})
endfunction()

# The modules' own targets, tessera::base and so on, are names of the libraries.
function(tessera_install_shared export name)
  install(TARGETS tessera_${name}_shared EXPORT ${export})
  foreach(module ${ARGN})
    add_library(tessera_${module}_shared INTERFACE)
    set_target_properties(tessera_${module}_shared PROPERTIES EXPORT_NAME ${module})
    target_link_libraries(tessera_${module}_shared INTERFACE tessera_${name}_shared)
    install(TARGETS tessera_${module}_shared EXPORT ${export})
  endforeach()
endfunction()

tessera_shared_library(core MODULES base layout format checkpoint LINKS fmt::fmt Threads::Threads nlohmann_json::nlohmann_json
                       PRIVATE_LINKS ISAL::ISAL ZLIB::ZLIB ${TESSERA_ZSTD} ${TESSERA_RE2})
if(TESSERA_TORCH)
  tessera_shared_library(torch MODULES comm tensor state fsdp LINKS tessera_core_shared tessera_torch)
endif()
if(TESSERA_SHARED)
  tessera_install_shared(tessera core base layout format checkpoint)
endif()
if(TESSERA_SHARED AND TESSERA_TORCH)
  install(TARGETS tessera_torch EXPORT tesseraTorch)
  tessera_install_shared(tesseraTorch torch comm tensor state fsdp)
endif()
