# Takes what the build needs beside LibTorch from the folder vendor of a bundle (tools/gpu-test --bundle), which has Debian's
# packages unpacked, in place of the system's. Use: -DCMAKE_PROJECT_TOP_LEVEL_INCLUDES=cmake/TesseraBundled.cmake
#
# What is C++ is compiled with the build or has headers alone, so it has the ABI of the LibTorch at hand. What is C is linked as
# Debian built it.

set(TESSERA_VENDOR ${CMAKE_CURRENT_LIST_DIR}/../vendor CACHE PATH "The folder with Debian's packages, unpacked")
get_filename_component(TESSERA_VENDOR ${TESSERA_VENDOR} REALPATH)
set(tessera_bundled_packages fmt ZLIB nlohmann_json ISAL RE2 Zstd CLI11 GTest rapidcheck)

# tessera_bundled_headers(<target>...): targets that are headers alone.
function(tessera_bundled_headers)
  foreach(target ${ARGV})
    add_library(${target} INTERFACE IMPORTED GLOBAL)
    target_include_directories(${target} SYSTEM INTERFACE ${TESSERA_VENDOR}/usr/include)
  endforeach()
endfunction()

# tessera_bundled_library(<target> <file>): sets <file>_found in the caller if there is such a library.
function(tessera_bundled_library target file)
  file(GLOB library ${TESSERA_VENDOR}/usr/lib/*/${file})
  if(library STREQUAL "")
    set(${file}_found FALSE PARENT_SCOPE)
    return()
  endif()
  set(${file}_found TRUE PARENT_SCOPE)
  # zlib.h includes a header from the folder of the architecture
  file(GLOB include ${TESSERA_VENDOR}/usr/include ${TESSERA_VENDOR}/usr/include/*-linux-gnu)
  add_library(${target} UNKNOWN IMPORTED GLOBAL)
  set_target_properties(${target} PROPERTIES IMPORTED_LOCATION ${library} INTERFACE_INCLUDE_DIRECTORIES "${include}"
                                             INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${include}")
endfunction()

function(tessera_bundled_tests)
  find_package(Threads REQUIRED)
  set(sources ${TESSERA_VENDOR}/usr/src/googletest)
  add_library(tessera_bundled_gtest STATIC ${sources}/googletest/src/gtest-all.cc ${sources}/googlemock/src/gmock-all.cc)
  target_include_directories(tessera_bundled_gtest SYSTEM
    PUBLIC ${sources}/googletest/include ${sources}/googlemock/include PRIVATE ${sources}/googletest ${sources}/googlemock)
  target_compile_features(tessera_bundled_gtest PUBLIC cxx_std_14)
  target_compile_options(tessera_bundled_gtest PRIVATE -w)
  target_link_libraries(tessera_bundled_gtest PUBLIC Threads::Threads)
  foreach(target gtest gmock)
    add_library(GTest::${target} ALIAS tessera_bundled_gtest)
  endforeach()
  # The tests on a device include RapidCheck's headers with others, and need no function of it.
  tessera_bundled_headers(rapidcheck rapidcheck_gtest)
endfunction()

macro(tessera_provide_bundled method package)
  if("${package}" IN_LIST tessera_bundled_packages)
    get_property(tessera_bundle_is_found GLOBAL PROPERTY TESSERA_BUNDLE_IS_FOUND)
    if(NOT tessera_bundle_is_found)
      set_property(GLOBAL PROPERTY TESSERA_BUNDLE_IS_FOUND TRUE)
      message(STATUS "Dependencies of the bundle: ${TESSERA_VENDOR}")
      tessera_bundled_headers(nlohmann_json::nlohmann_json CLI11::CLI11)
      # In a folder of its own: a LibTorch that has fmt provides it.
      add_library(fmt::fmt INTERFACE IMPORTED GLOBAL)
      target_include_directories(fmt::fmt SYSTEM INTERFACE ${TESSERA_VENDOR}/fmt)
      target_compile_definitions(fmt::fmt INTERFACE FMT_HEADER_ONLY=1)
      tessera_bundled_library(ISAL::ISAL libisal.so)
      tessera_bundled_library(ZLIB::ZLIB libz.a)
      tessera_bundled_library(Zstd::Zstd libzstd.a)
      if(NOT libisal.so_found OR NOT libz.a_found)
        message(FATAL_ERROR "${TESSERA_VENDOR} has no libisal.so or no libz.a; make the bundle again: tools/gpu-test --bundle")
      endif()
    endif()
    if("${package}" STREQUAL "GTest" AND NOT TARGET GTest::gmock)
      tessera_bundled_tests()
    endif()
    set(${package}_FOUND TRUE)
    if("${package}" STREQUAL "Zstd" AND NOT TARGET Zstd::Zstd)
      set(Zstd_FOUND FALSE)
    endif()
    if("${package}" STREQUAL "RE2")
      set(RE2_FOUND FALSE) # it is C++, and its package has no sources; maps of names are refused then
    endif()
  endif()
endmacro()
cmake_language(SET_DEPENDENCY_PROVIDER tessera_provide_bundled SUPPORTED_METHODS FIND_PACKAGE)
