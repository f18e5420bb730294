#pragma once
/// \file
/// The loss of a training that may be stopped and go on on other ranks: kept in a file, drawn as a curve.
///
///     LossCurve curve(directory / "loss.csv", step);  // what was learned up to `step` stays
///     curve.add({++step, loss, group.size()});
///     write_loss_plot(curve.points(), "loss.svg");
///
/// The file has a line for each step, "step,loss,ranks", below one that says so. For one process at a time.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera::examples {

struct LossPoint {
  std::int64_t step = 0;
  double loss = 0;
  int ranks = 1;
};

class LossCurve {
 public:
  /// Goes on with the points that the file has up to `last_step`, and drops the others from it. A line that can't be
  /// read, such as the last one of a process that was killed, is dropped. Throws `Error(io)`.
  LossCurve(std::filesystem::path file, std::int64_t last_step);

  /// Appends to the file, which has it when this returns. Throws `Error(io)`.
  void add(const LossPoint& point);
  const std::vector<LossPoint>& points() const { return points_; }

 private:
  std::filesystem::path file_;
  std::vector<LossPoint> points_;
};

/// An SVG image that needs nothing else. Consecutive points of as many ranks are one line, of a colour of its own.
/// Points whose loss is no number are left out.
std::string loss_plot(const std::vector<LossPoint>& points);
/// Writes it to a file, replacing one that is there at once. Throws `Error(io)`.
void write_loss_plot(const std::vector<LossPoint>& points, const std::filesystem::path& file);

}  // namespace tessera::examples
