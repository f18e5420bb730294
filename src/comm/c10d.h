#pragma once
// What differs between versions of LibTorch's c10d, in one place.

#include <torch/version.h>

#if TORCH_VERSION_MAJOR < 2
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#else
#include <torch/csrc/distributed/c10d/Backend.hpp>
#endif
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera::comm {

// What carries out collectives was called ProcessGroup before there were groups of several backends.
#if TORCH_VERSION_MAJOR < 2
using Backend = ::c10d::ProcessGroup;
#else
using Backend = ::c10d::Backend;
#endif
using BackendPtr = c10::intrusive_ptr<Backend>;
using StorePtr = c10::intrusive_ptr<::c10d::Store>;
using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

// Since 2.1 a store's server is built on libuv unless told otherwise, which not every LibTorch has, Debian's for one.
template <typename Options>
void without_libuv(Options& options) {
  if constexpr (requires { options.useLibUV; }) options.useLibUV = false;
}

}  // namespace tessera::comm
