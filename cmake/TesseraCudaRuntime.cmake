# To be included before find_package(Torch). A LibTorch with CUDA looks for CUDA's compiler, although C++ that uses LibTorch
# needs CUDA's headers and runtime alone. If there is no compiler, or if the LibTorch is one of pip's PyTorch, which has headers
# and runtime of its own CUDA beside it, this declares the targets that LibTorch's package would declare, and the package
# then looks for nothing. Without CUDA, or if the targets exist, this does nothing.

# pip's PyTorch is torch/ and has its CUDA in nvidia/*/include and nvidia/*/lib next to it, libraries by their version alone.
set(tessera_pip "")
file(TO_CMAKE_PATH "$ENV{CMAKE_PREFIX_PATH}" tessera_prefixes)
foreach(tessera_prefix ${Torch_DIR} ${Torch_ROOT} $ENV{Torch_ROOT} ${CMAKE_PREFIX_PATH} ${tessera_prefixes})
  # A prefix is torch/, torch/share/cmake or torch/share/cmake/Torch.
  foreach(tessera_up .. ../../.. ../../../..)
    if(tessera_pip STREQUAL "" AND EXISTS ${tessera_prefix}/${tessera_up}/torch/lib/libtorch_cuda.so)
      get_filename_component(tessera_pip ${tessera_prefix}/${tessera_up} ABSOLUTE)
    endif()
  endforeach()
endforeach()
set(tessera_pip_includes "")
set(tessera_pip_cudart "")
if(NOT tessera_pip STREQUAL "")
  file(GLOB tessera_pip_includes ${tessera_pip}/nvidia/*/include)
  file(GLOB tessera_pip_cudart ${tessera_pip}/nvidia/*/lib/libcudart.so*)
endif()

if(NOT TARGET torch::cudart)
  find_program(TESSERA_NVCC nvcc HINTS ${CUDA_TOOLKIT_ROOT_DIR} ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda
               PATH_SUFFIXES bin)
  find_path(TESSERA_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS ${tessera_pip_includes})
  find_library(TESSERA_CUDART cudart)
  find_library(TESSERA_NVTX nvToolsExt)
  mark_as_advanced(TESSERA_NVCC TESSERA_CUDA_INCLUDE_DIR TESSERA_CUDART TESSERA_NVTX)
  if(NOT tessera_pip_cudart STREQUAL "")
    list(GET tessera_pip_cudart 0 tessera_cudart)
    set(tessera_cuda_includes ${tessera_pip_includes})
    # Headers that the runtime's include and pip may leave out; LibTorch's do not depend on their version.
    find_path(TESSERA_CUDA_TOOLKIT_INCLUDE_DIR crt/host_defines.h PATHS /usr/local/cuda/include)
    mark_as_advanced(TESSERA_CUDA_TOOLKIT_INCLUDE_DIR)
    if(TESSERA_CUDA_TOOLKIT_INCLUDE_DIR)
      list(APPEND tessera_cuda_includes ${TESSERA_CUDA_TOOLKIT_INCLUDE_DIR})
    endif()
  elseif(NOT TESSERA_NVCC AND NOT CMAKE_CUDA_COMPILER AND TESSERA_CUDA_INCLUDE_DIR AND TESSERA_CUDART)
    set(tessera_cudart ${TESSERA_CUDART})
    set(tessera_cuda_includes ${TESSERA_CUDA_INCLUDE_DIR})
  else()
    set(tessera_cudart "")
  endif()
  if(NOT tessera_cudart STREQUAL "")
    add_library(torch::cudart INTERFACE IMPORTED GLOBAL)
    target_include_directories(torch::cudart INTERFACE ${tessera_cuda_includes})
    target_link_libraries(torch::cudart INTERFACE ${tessera_cudart})
    # Headers of NVTX 3 replace its library in newer ones.
    add_library(torch::nvtoolsext INTERFACE IMPORTED GLOBAL)
    add_library(torch::nvtx3 INTERFACE IMPORTED GLOBAL)
    if(TESSERA_NVTX)
      target_link_libraries(torch::nvtoolsext INTERFACE ${TESSERA_NVTX})
    endif()
    # Libraries of CUDA that LibTorch's own targets may name; LibTorch loads them itself.
    if(EXISTS ${tessera_pip}/torch/share/cmake/Caffe2/Caffe2Targets.cmake)
      file(READ ${tessera_pip}/torch/share/cmake/Caffe2/Caffe2Targets.cmake tessera_targets)
      string(REGEX MATCHALL "(CUDA::[A-Za-z0-9_]+|(caffe2|torch)::(cu[a-zA-Z0-9]+|nv[a-zA-Z0-9]+))" tessera_targets
             "${tessera_targets}")
      foreach(tessera_target ${tessera_targets})
        if(NOT TARGET ${tessera_target})
          add_library(${tessera_target} INTERFACE IMPORTED GLOBAL)
        endif()
      endforeach()
    endif()
  endif()
endif()
