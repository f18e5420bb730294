# To be included before find_package(Torch). A LibTorch with CUDA looks for CUDA's compiler, although C++ that uses LibTorch
# needs CUDA's headers and runtime alone. If there is no compiler, this declares the targets that LibTorch's package
# would declare, and the package then looks for nothing. Without CUDA, or if the targets exist, this does nothing.

if(NOT TARGET torch::cudart)
  find_program(TESSERA_NVCC nvcc HINTS ${CUDA_TOOLKIT_ROOT_DIR} ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda
               PATH_SUFFIXES bin)
  find_path(TESSERA_CUDA_INCLUDE_DIR cuda_runtime_api.h)
  find_library(TESSERA_CUDART cudart)
  find_library(TESSERA_NVTX nvToolsExt)
  mark_as_advanced(TESSERA_NVCC TESSERA_CUDA_INCLUDE_DIR TESSERA_CUDART TESSERA_NVTX)
  if(NOT TESSERA_NVCC AND NOT CMAKE_CUDA_COMPILER AND TESSERA_CUDA_INCLUDE_DIR AND TESSERA_CUDART AND TESSERA_NVTX)
    add_library(torch::cudart INTERFACE IMPORTED)
    target_include_directories(torch::cudart INTERFACE ${TESSERA_CUDA_INCLUDE_DIR})
    target_link_libraries(torch::cudart INTERFACE ${TESSERA_CUDART})
    add_library(torch::nvtoolsext INTERFACE IMPORTED)
    target_link_libraries(torch::nvtoolsext INTERFACE ${TESSERA_NVTX})
  endif()
endif()
