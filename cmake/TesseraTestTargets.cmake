# What tests are compiled with: flags and precompiled headers.

find_package(GTest REQUIRED)
find_package(rapidcheck REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(Python3 REQUIRED COMPONENTS Interpreter)

add_library(tessera_test_flags INTERFACE)
target_link_libraries(tessera_test_flags INTERFACE GTest::gmock tessera_flags)
# Tests run in the modules and in LibTorch. To optimize the tests themselves gains little, and takes a sixth of the time that g++
# needs for them, two thirds of clang's with sanitizers. The modules are optimized there too: clang takes 2.4 times as long for them, and
# their tests two thirds of the time.
target_compile_options(tessera_test_flags INTERFACE $<IF:$<CONFIG:Release>,-O1,-O0>)
add_library(tessera_torch_test_flags INTERFACE)
target_link_libraries(tessera_torch_test_flags INTERFACE GTest::gmock tessera_flags)
target_compile_options(tessera_torch_test_flags INTERFACE -O0)
if(TESSERA_SANITIZE)
  # What sanitizers report has the functions of tests, and line numbers of the modules: an eighth of the time that clang needs for tests.
  target_compile_options(tessera_test_flags INTERFACE -g0)
  target_compile_options(tessera_torch_test_flags INTERFACE -g0)
endif()

# What most tests include, compiled once for the tests with LibTorch and once for those without.
add_library(tessera_test_headers OBJECT ${PROJECT_SOURCE_DIR}/tests/precompiled.cpp)
tessera_precompiles(tessera_test_headers)
target_link_libraries(tessera_test_headers PRIVATE tessera_base rapidcheck_gtest nlohmann_json::nlohmann_json tessera_test_flags)
target_precompile_headers(tessera_test_headers PRIVATE <gmock/gmock.h> <gtest/gtest.h> <fmt/format.h> <filesystem> <fstream>
                                                       <functional> <map> <string> <vector>
                                                       <nlohmann/json.hpp> <rapidcheck/gtest.h>)
if(TESSERA_TORCH)
  add_library(tessera_torch_test_headers OBJECT ${PROJECT_SOURCE_DIR}/tests/precompiled.cpp)
  tessera_precompiles(tessera_torch_test_headers)
  target_link_libraries(tessera_torch_test_headers PRIVATE tessera_base tessera_torch rapidcheck_gtest nlohmann_json::nlohmann_json tessera_torch_test_flags)
  target_precompile_headers(tessera_torch_test_headers PRIVATE <ATen/ATen.h> <torch/nn/module.h> <torch/nn/modules/linear.h>
    <torch/nn/modules/container/sequential.h> <torch/optim/adamw.h> <torch/optim/sgd.h> <gmock/gmock.h> <gtest/gtest.h>
    <fmt/format.h> <filesystem> <fstream> <nlohmann/json.hpp> <rapidcheck/gtest.h>)
endif()
