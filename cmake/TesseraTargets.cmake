# Flags that every target of ours gets, and the three ways of declaring one.

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(ZLIB REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(ISAL REQUIRED)
find_package(Zstd QUIET) # checkpoints can be compressed where it is found
if(Zstd_FOUND)
  set(TESSERA_ZSTD Zstd::Zstd)
endif()
find_package(RE2 QUIET) # maps of names need it
if(RE2_FOUND)
  set(TESSERA_RE2 RE2::RE2)
endif()

add_library(tessera_flags INTERFACE)
target_include_directories(tessera_flags INTERFACE ${PROJECT_SOURCE_DIR}/include)
target_compile_options(tessera_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion)
# Names of files in assertions are those within the tree: a clone elsewhere then compiles to the same, and ccache finds it.
target_compile_options(tessera_flags INTERFACE -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # False alarms: on std::string, GCC bug 105651; on std::vector and std::string, GCC bug 105329.
  target_compile_options(tessera_flags INTERFACE -Wno-restrict -Wno-stringop-overflow)
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 15)
  # False alarms on std::vector<bool>::reserve within LibTorch's headers, inlined into ours.
  target_compile_options(tessera_flags INTERFACE -Wno-array-bounds -Wno-stringop-overflow)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC collects garbage from here on, in KiB. With LibTorch's headers it would look for it often and find little: an eighth of the time.
  target_compile_options(tessera_flags INTERFACE --param=ggc-min-heapsize=1000000)
endif()
if(TESSERA_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # A type of an anonymous namespace is as private in a source that is included as in one that is not.
  target_compile_options(tessera_flags INTERFACE -Wno-subobject-linkage)
endif()
if(TESSERA_WERROR)
  target_compile_options(tessera_flags INTERFACE -Werror)
endif()
if(TESSERA_FUZZ)
  target_compile_options(tessera_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
if(TESSERA_SANITIZE)
  target_compile_options(tessera_flags INTERFACE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer
                                                 -fno-sanitize-recover=all)
  target_link_options(tessera_flags INTERFACE -fsanitize=${TESSERA_SANITIZE})
  if(TESSERA_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 15)
    # Up to clang 14 programs look for uses of locals after a return only if they are asked to, but all functions are prepared for it.
    target_compile_options(tessera_flags INTERFACE -fsanitize-address-use-after-return=never)
  endif()
  # Programs with sanitizers and line numbers are large: lld links them in a fifth of the time.
  find_program(TESSERA_LLD ld.lld)
  if(TESSERA_LLD AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    target_link_options(tessera_flags INTERFACE -fuse-ld=lld)
  endif()
endif()

# Makes an archive fit for shared libraries, at no cost: a function's own definition is still the one that is inlined.
function(tessera_position_independent target)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE -fno-semantic-interposition)
endfunction()

# tessera_precompiles(<target>): the target compiles headers for others. ccache identifies them by the text of what they include; clang
# would compare times as well, and refuse them after an update of the system that changed no header.
function(tessera_precompiles target)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND TESSERA_CCACHE)
    target_compile_options(${target} PRIVATE "SHELL:-Xclang -fno-pch-timestamp")
  endif()
endfunction()

# tessera_module(<name> SOURCES <file>... LINKS <module or library>...): one module, a static library tessera_<name>, which
# other projects call tessera::<name>. LINKS is what the module may know; see the module law in docs/architecture.md.
function(tessera_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINKS;PRIVATE_LINKS" ${ARGN})
  add_library(tessera_${name} STATIC ${ARG_SOURCES})
  add_library(tessera::${name} ALIAS tessera_${name})
  target_compile_features(tessera_${name} PUBLIC cxx_std_20)
  tessera_position_independent(tessera_${name})
  target_link_libraries(tessera_${name} PUBLIC ${ARG_LINKS} PRIVATE ${ARG_PRIVATE_LINKS} $<BUILD_INTERFACE:tessera_flags>)
  target_include_directories(tessera_${name} PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include;${PROJECT_BINARY_DIR}/include>"
                                                    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
                                             PRIVATE ${PROJECT_SOURCE_DIR}/src)
  set_target_properties(tessera_${name} PROPERTIES UNITY_BUILD ${TESSERA_UNITY} UNITY_BUILD_BATCH_SIZE ${TESSERA_UNITY_BATCH})
  if("${ARG_LINKS}" MATCHES "tessera_torch")
    target_precompile_headers(tessera_${name} REUSE_FROM tessera_torch_headers)
  endif()
endfunction()

# tessera_torch_program(<target>): flags and precompiled headers of a program on LibTorch that is no test. With sanitizers they are those
# of the tests: clang needs a third of the time, and the program runs in the modules and in LibTorch.
function(tessera_torch_program target)
  if(TESSERA_SANITIZE AND TESSERA_TESTS)
    target_link_libraries(${target} PRIVATE tessera_torch_test_flags)
    target_precompile_headers(${target} REUSE_FROM tessera_torch_test_headers)
  else()
    target_link_libraries(${target} PRIVATE tessera_flags)
    target_compile_options(${target} PRIVATE -fPIC -fno-semantic-interposition) # as the precompiled headers
    target_precompile_headers(${target} REUSE_FROM tessera_torch_headers)
  endif()
endfunction()

# tessera_tests(<module> SOURCES <file>... [APART <file>...] LINKS <library>... [SHARDS <n>]): the test program
# <module>_test, whose cases run in processes of their own (tests/support/main.cpp). CTest runs it in <n> parts, side by
# side. The sources are compiled together, except those after APART, which have names that others have too.
function(tessera_tests module)
  cmake_parse_arguments(ARG "" "SHARDS" "SOURCES;APART;LINKS" ${ARGN})
  set(name ${module}_test)
  add_executable(${name} ${ARG_SOURCES} ${ARG_APART} ${PROJECT_SOURCE_DIR}/tests/support/main.cpp)
  set_source_files_properties(${ARG_APART} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  set_target_properties(${name} PROPERTIES UNITY_BUILD ${TESSERA_UNITY} UNITY_BUILD_BATCH_SIZE ${TESSERA_UNITY_BATCH})
  target_link_libraries(${name} PRIVATE tessera_test_paths)
  set(torch "")
  if("${ARG_LINKS}" MATCHES "tessera_(comm|tensor|state|fsdp)")
    set(torch _torch)
  endif()
  target_link_libraries(${name} PRIVATE ${ARG_LINKS} rapidcheck_gtest nlohmann_json::nlohmann_json tessera${torch}_test_flags)
  target_precompile_headers(${name} REUSE_FROM tessera${torch}_test_headers)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/src)
  if(NOT ARG_SHARDS)
    set(ARG_SHARDS 1)
  endif()
  # Ranks share the processors: threads of OpenMP that wait for each other would spin in the others' way.
  set(threads "")
  if(torch)
    set(threads ";OMP_NUM_THREADS=1")
  endif()
  math(EXPR last "${ARG_SHARDS} - 1")
  foreach(shard RANGE ${last})
    set(test ${name})
    if(ARG_SHARDS GREATER 1)
      math(EXPR number "${shard} + 1")
      set(test ${name}.${number}_of_${ARG_SHARDS})
    endif()
    add_test(NAME ${test} COMMAND ${name})
    # COST: these take longest, so that they do not begin last.
    set_tests_properties(${test} PROPERTIES COST 10 ENVIRONMENT
      "TESSERA_TEST_SHARDS=${ARG_SHARDS};TESSERA_TEST_SHARD=${shard};TESSERA_TEST_TIMES=${PROJECT_BINARY_DIR}/test-times.txt${threads}")
  endforeach()
endfunction()

# tessera_tests_without_shared_memory(MODULE FILTER): some cases of a module's tests again, on c10d between the ranks of this host.
function(tessera_tests_without_shared_memory module filter)
  add_test(NAME ${module}_test.without_shared_memory COMMAND ${module}_test --gtest_filter=${filter})
  set_tests_properties(${module}_test.without_shared_memory PROPERTIES ENVIRONMENT
    "TESSERA_HOST_MEMORY=0;TESSERA_TEST_TIMES=${PROJECT_BINARY_DIR}/test-times.txt;OMP_NUM_THREADS=1")
endfunction()
