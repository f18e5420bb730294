#pragma once
// Work of c10d whose collective a HostEngine runs.

#include <chrono>
#include <memory>
#include <stdexcept>
#include <utility>

#include "comm/c10d.h"
#include "comm/host/engine.h"

namespace tessera::comm {

class EngineWork final : public ::c10d::Work {
 public:
  EngineWork(int rank, ::c10d::OpType type, std::shared_ptr<HostEngine> engine, EngineOpPtr op)
      : Work(rank, type), engine_(std::move(engine)), op_(std::move(op)) {}

  bool isCompleted() override { return engine_->has_ended(*op_); }
  bool isSuccess() const override { return engine_->has_ended(*op_); }
  bool wait(std::chrono::milliseconds timeout) override {
    constexpr std::chrono::hours kNoLimit(24 * 365);
    if (!engine_->wait(*op_, timeout.count() > 0 ? timeout : kNoLimit)) throw std::runtime_error("wait: timeout");
    return true;
  }

 private:
  std::shared_ptr<HostEngine> engine_;
  EngineOpPtr op_;
};

}  // namespace tessera::comm
