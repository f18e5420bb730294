# LibTorch, and the c10d backends that it has. CMAKE_PREFIX_PATH tells where it is, if it is not a system library.

include(TesseraCudaRuntime)
find_package(Torch REQUIRED)
# LibTorch gives its ABI to what links it. The torch-free modules, which don't, must have the same.
if(TORCH_CXX_FLAGS MATCHES "_GLIBCXX_USE_CXX11_ABI=0" AND NOT CMAKE_CXX_FLAGS MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
  message(FATAL_ERROR "${Torch_DIR}: this LibTorch has the ABI that the C++ library had before C++11. Take the one with the cxx11 ABI, or "
                      "build tessera, and all that links it, with -DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0")
endif()
# A LibTorch that contains protobuf names an alias of an empty target in its place, which a test of a compilation can't import.
if(TARGET torch_cpu AND TARGET protobuf::libprotobuf)
  get_target_property(tessera_protobuf protobuf::libprotobuf ALIASED_TARGET)
  if(tessera_protobuf)
    get_target_property(tessera_links torch_cpu INTERFACE_LINK_LIBRARIES)
    list(REMOVE_ITEM tessera_links protobuf::libprotobuf)
    set_target_properties(torch_cpu PROPERTIES INTERFACE_LINK_LIBRARIES "${tessera_links}")
  endif()
endif()
add_library(tessera_torch INTERFACE)
# A LibTorch that has headers of fmt beside its own, as pip's, includes these, and so must everything that is linked with it: another
# version's library does not have what they declare. System headers are searched last, so a LibTorch of the system has the system's fmt.
list(GET TORCH_INCLUDE_DIRS 0 tessera_torch_include)
get_filename_component(tessera_torch_include ${tessera_torch_include} REALPATH)
if(EXISTS ${tessera_torch_include}/fmt/format.h AND NOT tessera_torch_include IN_LIST CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES)
  message(STATUS "fmt: the headers of LibTorch, ${tessera_torch_include}/fmt")
  set_target_properties(fmt::fmt PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${tessera_torch_include})
  target_compile_definitions(fmt::fmt INTERFACE FMT_HEADER_ONLY=1)
  target_compile_definitions(tessera_torch INTERFACE FMT_HEADER_ONLY=1)
endif()
# What is installed takes the LibTorch that tesseraConfig.cmake finds there.
target_include_directories(tessera_torch SYSTEM INTERFACE "$<BUILD_INTERFACE:${TORCH_INCLUDE_DIRS}>")
target_link_libraries(tessera_torch INTERFACE "$<BUILD_INTERFACE:${TORCH_LIBRARIES}>")
target_compile_definitions(tessera_torch INTERFACE USE_DISTRIBUTED USE_RPC USE_TENSORPIPE USE_C10D USE_C10D_GLOO)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND Torch_VERSION VERSION_LESS 2)
  target_compile_options(tessera_torch # tesseraConfig.cmake does the same for what is installed
    INTERFACE "$<BUILD_INTERFACE:SHELL:-include \"${PROJECT_SOURCE_DIR}/cmake/clang_libtorch_1_13.h\">")
endif()

# What most sources on LibTorch include, compiled once for all modules: it takes longer than they do. A source includes
# what it needs all the same; tools/check lints it without this.
file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/torch_headers.cpp CONTENT "")
add_library(tessera_torch_headers OBJECT ${PROJECT_BINARY_DIR}/torch_headers.cpp)
target_compile_features(tessera_torch_headers PUBLIC cxx_std_20)
tessera_position_independent(tessera_torch_headers)
tessera_precompiles(tessera_torch_headers)
target_link_libraries(tessera_torch_headers PRIVATE tessera_torch tessera_flags fmt::fmt)
target_precompile_headers(tessera_torch_headers PRIVATE <torch/nn/module.h> <fmt/format.h>)

# c10d's header of MPI includes mpi.h, which must be of the MPI that LibTorch links: on Debian, libopenmpi-dev.
find_package(MPI QUIET COMPONENTS CXX)

# Sets TESSERA_HAS_<name> if `expression` on c10d's ProcessGroup<name> can be linked.
include(CheckCXXSourceCompiles)
function(tessera_find_backend name expression)
  set(CMAKE_REQUIRED_LIBRARIES ${TORCH_LIBRARIES})
  set(CMAKE_REQUIRED_INCLUDES ${TORCH_INCLUDE_DIRS} ${MPI_CXX_INCLUDE_DIRS})
  set(CMAKE_REQUIRED_DEFINITIONS -DUSE_C10D_${name})
  check_cxx_source_compiles("
    #include <torch/csrc/distributed/c10d/ProcessGroup${name}.hpp>
    int main() { return ::c10d::ProcessGroup${name}::${expression} ? 1 : 0; }" TESSERA_HAS_${name})
endfunction()
tessera_find_backend(NCCL "Options::create()")
tessera_find_backend(MPI "createProcessGroupMPI()")

# Sets TESSERA_HAS_TENSORPIPE if LibTorch has the agent of its RPC: Debian's has up to 2.6.
set(CMAKE_REQUIRED_LIBRARIES ${TORCH_LIBRARIES})
set(CMAKE_REQUIRED_INCLUDES ${TORCH_INCLUDE_DIRS})
set(CMAKE_REQUIRED_DEFINITIONS -DUSE_DISTRIBUTED -DUSE_RPC -DUSE_TENSORPIPE)
check_cxx_source_compiles("
  #include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
  int main() { return torch::distributed::rpc::TensorPipeAgent::guessAddress().empty() ? 1 : 0; }"
  TESSERA_HAS_TENSORPIPE)
unset(CMAKE_REQUIRED_LIBRARIES)
unset(CMAKE_REQUIRED_INCLUDES)
unset(CMAKE_REQUIRED_DEFINITIONS)
