#pragma once
/// \file
/// Records the loss of a training run in a file and plots it. The run may stop and resume on another number of ranks.
///
///     LossCurve curve(directory / "loss.csv", step);  // keeps the points up to `step`
///     curve.add({++step, loss, group.size()});
///     write_loss_plot(curve.points(), "loss.svg");
///
/// The file is CSV with the header "step,loss,ranks" and a line for each step. Only one process may use it at a time.

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
  /// Reads the points of the file up to `last_step` and removes later ones from it. Removes lines that cannot be
  /// parsed, such as the last line of a killed process. Throws `Error(io)`.
  LossCurve(std::filesystem::path file, std::int64_t last_step);

  /// Appends a point and flushes the file. Throws `Error(io)`.
  void add(const LossPoint& point);
  const std::vector<LossPoint>& points() const { return points_; }

 private:
  std::filesystem::path file_;
  std::vector<LossPoint> points_;
};

/// Returns a self-contained SVG image. Consecutive points with the same number of ranks form one line with its own
/// colour. Points whose loss is not finite are omitted.
std::string loss_plot(const std::vector<LossPoint>& points);
/// Writes the image to a file and replaces an existing one atomically. Throws `Error(io)`.
void write_loss_plot(const std::vector<LossPoint>& points, const std::filesystem::path& file);

}  // namespace tessera::examples
