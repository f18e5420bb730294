#pragma once
/// \file
/// Transforms of the stored bytes of a checkpoint's items, such as compression or encryption.
///
///     WriteOptions options;
///     options.transforms = {zstd_transform()};
///
/// A DCP checkpoint names the transforms of each item in `.metadata`. A reader undoes them by that name, so it needs no
/// option for transforms that tessera has; those of a program are registered in a TransformRegistry. A range of a
/// transformed item cannot be read alone: the first read of an item undoes its transforms once, into memory or, if it
/// is large, into an unnamed file in the directory for temporary files (TMPDIR).
///
/// Law: an item that is saved with the transforms [a, b] is stored as b(a(item)), and its descriptors are those of b
/// and a, the order in which a reader undoes them. PyTorch 2.7 and later: torch/distributed/checkpoint/_extension.py;
/// the order is that of its reader.

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/bytes.h"

namespace tessera::checkpoint {

/// A receiver of the bytes of a stream, in order.
class ByteSink {
 public:
  ByteSink() = default;
  ByteSink(const ByteSink&) = delete;
  ByteSink& operator=(const ByteSink&) = delete;
  virtual ~ByteSink() = default;
  virtual void write(ByteView bytes) = 0;
  /// Ends the stream. Called once, after the last `write`.
  virtual void finish() = 0;
};

/// A transform that can be undone. Several threads may call it; each stream is used by one thread.
class StreamTransform {
 public:
  StreamTransform() = default;
  StreamTransform(const StreamTransform&) = delete;
  StreamTransform& operator=(const StreamTransform&) = delete;
  virtual ~StreamTransform() = default;
  /// Returns the name that a checkpoint stores, "name/version": "stream.zstd/1". PyTorch: get_descriptor.
  virtual std::string descriptor() const = 0;
  /// Returns a stream that writes what it receives, transformed, to `out`, which outlives it. Its `finish` finishes
  /// `out`. PyTorch: transform_to.
  virtual std::unique_ptr<ByteSink> apply(ByteSink& out) const = 0;
  /// Returns the inverse stream. It throws `Error(corrupt)` if what it receives is not a result of the transform.
  /// PyTorch: transform_from.
  virtual std::unique_ptr<ByteSink> undo(ByteSink& out) const = 0;
};

using TransformPtr = std::shared_ptr<const StreamTransform>;

/// Returns a transform that compresses with Zstandard, as one frame with a checksum. `level` is 1 (fast) to 19 (small).
/// Throws `Error(unsupported)` if `has_zstd` is false, and `Error(invalid_argument)` for another level. PyTorch:
/// ZStandard.
TransformPtr zstd_transform(int level = 3);
/// Returns whether tessera was built with libzstd.
bool has_zstd();

/// The transforms that a reader knows. PyTorch: ExtensionRegistry.
class TransformRegistry {
 public:
  /// Returns the transform of a version, or throws `Error(unsupported)` for one that it cannot undo.
  using Create = std::function<TransformPtr(const std::string& version)>;

  /// Creates a registry that has "stream.zstd" if `has_zstd()`.
  TransformRegistry();
  /// Registers a transform, in place of one of the same name.
  void add(const std::string& name, Create create);
  /// Returns the transforms of these descriptors. Throws `Error(unsupported)` naming one that is not registered.
  std::vector<TransformPtr> create(std::span<const std::string> descriptors) const;

 private:
  std::map<std::string, Create, std::less<>> creators_;
};

}  // namespace tessera::checkpoint
