// Compresses streams with Zstandard (RFC 8878).

#include <zstd.h>

#include <memory>

#include "tessera/base/error.h"
#include "tessera/checkpoint/transform.h"

namespace tessera::checkpoint {

namespace {

void check_zstd(std::size_t result, const char* operation) {
  if (ZSTD_isError(result) == 0) return;
  fail(ErrorCode::corrupt, "{}: {}", operation, ZSTD_getErrorName(result));
}

template <typename Context>
Context* require_context(Context* context) {
  if (context == nullptr) fail(ErrorCode::io, "zstd: no memory for a context");
  return context;
}

class Compressor final : public ByteSink {
 public:
  Compressor(int level, ByteSink& out)
      : context_(require_context(ZSTD_createCCtx()), ZSTD_freeCCtx), buffer_(ZSTD_CStreamOutSize()), out_(out) {
    check_zstd(ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_compressionLevel, level), "zstd");
    check_zstd(ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_checksumFlag, 1), "zstd");
  }

  void write(ByteView bytes) override {
    ZSTD_inBuffer in{bytes.data(), bytes.size(), 0};
    while (in.pos < in.size) step(in, ZSTD_e_continue);
  }
  void finish() override {
    ZSTD_inBuffer in{nullptr, 0, 0};
    while (step(in, ZSTD_e_end) != 0) {
    }
    out_.finish();
  }

 private:
  std::size_t step(ZSTD_inBuffer& in, ZSTD_EndDirective directive) {
    ZSTD_outBuffer to{buffer_.data(), buffer_.size(), 0};
    const std::size_t result = ZSTD_compressStream2(context_.get(), &to, &in, directive);
    check_zstd(result, "zstd");
    if (to.pos > 0) out_.write(ByteView(buffer_).first(to.pos));
    return result;
  }

  std::unique_ptr<ZSTD_CCtx, std::size_t (*)(ZSTD_CCtx*)> context_;
  Bytes buffer_;
  ByteSink& out_;
};

class Decompressor final : public ByteSink {
 public:
  explicit Decompressor(ByteSink& out)
      : context_(require_context(ZSTD_createDCtx()), ZSTD_freeDCtx), buffer_(ZSTD_DStreamOutSize()), out_(out) {}

  void write(ByteView bytes) override {
    ZSTD_inBuffer in{bytes.data(), bytes.size(), 0};
    bool is_full = false;  // then the context may hold more than fit
    while (in.pos < in.size || is_full) {
      ZSTD_outBuffer to{buffer_.data(), buffer_.size(), 0};
      const std::size_t result = ZSTD_decompressStream(context_.get(), &to, &in);
      check_zstd(result, "undo zstd");
      if (to.pos > 0) out_.write(ByteView(buffer_).first(to.pos));
      is_open_ = result != 0;
      is_full = is_open_ && to.pos == to.size;
    }
  }
  void finish() override {
    if (is_open_) fail(ErrorCode::corrupt, "undo zstd: the bytes end within a frame, expected its end");
    out_.finish();
  }

 private:
  std::unique_ptr<ZSTD_DCtx, std::size_t (*)(ZSTD_DCtx*)> context_;
  Bytes buffer_;
  ByteSink& out_;
  bool is_open_ = true;  // a frame has begun, or none was seen
};

class Zstd final : public StreamTransform {
 public:
  explicit Zstd(int level) : level_(level) {}
  std::string descriptor() const override { return "stream.zstd/1"; }
  std::unique_ptr<ByteSink> apply(ByteSink& out) const override { return std::make_unique<Compressor>(level_, out); }
  std::unique_ptr<ByteSink> undo(ByteSink& out) const override { return std::make_unique<Decompressor>(out); }

 private:
  int level_;
};

}  // namespace

bool has_zstd() { return true; }

TransformPtr zstd_transform(int level) {
  if (level < 1 || level > 19) fail(ErrorCode::invalid_argument, "zstd: level {}, expected 1 to 19", level);
  return std::make_shared<const Zstd>(level);
}

}  // namespace tessera::checkpoint
