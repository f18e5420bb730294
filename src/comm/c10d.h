#pragma once
// The differences between versions of LibTorch's c10d.

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

// Before 2.0, c10d's backend class was called ProcessGroup.
#if TORCH_VERSION_MAJOR < 2
using Backend = ::c10d::ProcessGroup;
#else
using Backend = ::c10d::Backend;
#endif
using BackendPtr = c10::intrusive_ptr<Backend>;
using StorePtr = c10::intrusive_ptr<::c10d::Store>;
using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

// A client of 1.13's store has a thread that ends the process if the server resets its connection.
inline constexpr bool kStoreHasCallbackThread = TORCH_VERSION_MAJOR < 2;

// Since 2.1 a store's server uses libuv by default, which some builds of LibTorch lack (Debian's, for example).
template <typename Options>
void without_libuv(Options& options) {
  if constexpr (requires { options.useLibUV; }) options.useLibUV = false;
}

}  // namespace tessera::comm
