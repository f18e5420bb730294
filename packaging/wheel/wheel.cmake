# Links the command and libtessera.so as the wheel has them: with glibc 2.28 and later and with nothing else of the system. What they
# need of libstdc++, fmt, zlib and Zstandard is in them, and ISA-L, of which Debian has no static library, is a file next to them
# under a name of its own. Use: -DCMAKE_PROJECT_TOP_LEVEL_INCLUDES=packaging/wheel/wheel.cmake

set(tessera_wheel_folder ${CMAKE_CURRENT_LIST_DIR})
set(tessera_wheel_isal libisal-t.so)
# Debian's static RE2 cannot be linked into a shared library, and the shared one needs a newer libstdc++.
set(CMAKE_DISABLE_FIND_PACKAGE_RE2 ON)
add_compile_options(-ffunction-sections -fdata-sections) # so that what a file does not use is left out of it

# tessera_find_libraries_of_wheel(): at the first find_package, when the compiler and its folders are known.
function(tessera_find_libraries_of_wheel)
  find_library(ZLIB_LIBRARY libz.a REQUIRED)
  find_library(Zstd_LIBRARY libzstd.a REQUIRED)
  find_path(FMT_INCLUDE_DIR fmt/format-inl.h REQUIRED)
  find_library(SYSTEM_ISAL_LIBRARY isal REQUIRED)
  set(ISAL_LIBRARY ${CMAKE_BINARY_DIR}/${tessera_wheel_isal} CACHE FILEPATH "ISA-L under the name that it has in the wheel")
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(COMMAND ${Python3_EXECUTABLE} ${tessera_wheel_folder}/elf.py ${SYSTEM_ISAL_LIBRARY} ${ISAL_LIBRARY}
                  COMMAND_ERROR_IS_FATAL ANY)
  add_library(fmt::fmt INTERFACE IMPORTED GLOBAL)
  target_include_directories(fmt::fmt SYSTEM INTERFACE ${FMT_INCLUDE_DIR})
  target_compile_definitions(fmt::fmt INTERFACE FMT_HEADER_ONLY=1)
endfunction()

macro(tessera_provide_for_wheel method package)
  if(NOT TARGET fmt::fmt AND NOT "${package}" STREQUAL "Python3")
    tessera_find_libraries_of_wheel()
  endif()
  if("${package}" STREQUAL "fmt")
    set(fmt_FOUND TRUE)
  endif()
endmacro()
cmake_language(SET_DEPENDENCY_PROVIDER tessera_provide_for_wheel SUPPORTED_METHODS FIND_PACKAGE)

# tessera_link_for_wheel(<target> <folder of ISA-L from there>)
function(tessera_link_for_wheel target folder)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:tessera_glibc>)
  # libpthread.so.0 has symbols that libc.so.6 has from glibc 2.34 on, so the linker would leave it out.
  target_link_options(${target} PRIVATE -s -static-libstdc++ LINKER:--gc-sections LINKER:--push-state,--no-as-needed,-l:libpthread.so.0,--pop-state)
  set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH ${folder})
endfunction()

function(tessera_link_files_of_wheel)
  add_library(tessera_glibc OBJECT ${tessera_wheel_folder}/glibc.cpp)
  set_target_properties(tessera_glibc PROPERTIES POSITION_INDEPENDENT_CODE ON)
  tessera_link_for_wheel(tessera_c_shared $ORIGIN)
  tessera_link_for_wheel(tessera $ORIGIN/..)
  target_sources(tessera PRIVATE ${tessera_wheel_folder}/glibc_start.cpp)
endfunction()
cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL tessera_link_files_of_wheel)
