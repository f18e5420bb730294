#include "loss_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera::examples {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kTitleLine = "step,loss,ranks\n";

std::string line_of(const LossPoint& point) {
  return fmt::format("{},{:.6f},{}\n", point.step, point.loss, point.ranks);
}

std::optional<LossPoint> point_of(const std::string& line) {
  std::istringstream in(line);
  LossPoint point;
  char comma = 0;
  in >> point.step >> comma >> point.loss >> comma >> point.ranks;
  return in ? std::optional(point) : std::nullopt;
}

std::vector<LossPoint> read_points(const fs::path& file, std::int64_t last_step) {
  std::vector<LossPoint> points;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    const std::optional<LossPoint> point = point_of(line);
    if (point && point->step <= last_step) points.push_back(*point);
  }
  return points;
}

void replace_file(const fs::path& file, std::string_view text) {
  const fs::path temporary = file.string() + ".tmp";
  std::error_code ignored;
  fs::remove(temporary, ignored);
  write_new_file(temporary, as_bytes(text));
  rename_replacing(temporary, file);
}

// The image and the area between its axes, in pixels.
constexpr double kWidth = 900, kHeight = 480, kLeft = 64, kRight = 872, kTop = 72, kBottom = 424;
constexpr std::array<std::string_view, 6> kColours = {"#2f6db5", "#d1662a", "#3f8f5b", "#8a5bb0", "#b8912b", "#b5476b"};

constexpr std::string_view kHead =
    R"svg(<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}">
<title>Training loss by step</title>
<style>
text {{ font: 15px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif; fill: #4a463f; }}
.title {{ font-size: 20px; font-weight: 600; fill: #2a2722; }}
.grid {{ stroke: #e4dfd5; }}
.axis {{ stroke: #8d8679; }}
.seam {{ stroke: #8d8679; stroke-dasharray: 3 4; }}
polyline {{ fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }}
</style>
<rect width="{0}" height="{1}" fill="#fcfbf8"/>
)svg";

// An axis: maps values to pixels and chooses the ticks.
struct Axis {
  double first, last;        // values
  double first_at, last_at;  // pixels
  double tick;

  double at(double value) const { return first_at + (value - first) / (last - first) * (last_at - first_at); }
};

// Returns 1, 2 or 5 times a power of ten, so that there are about `count` ticks.
double tick_of(double range, double count) {
  const double power = std::pow(10, std::floor(std::log10(range / count)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (range / (factor * power) <= count) return factor * power;
  }
  return 10 * power;
}

// The values from the lowest tick to the highest.
Axis axis_of(double lowest, double highest, double count, double first_at, double last_at) {
  const double range = highest > lowest ? highest - lowest : 1;
  const double tick = tick_of(range, count);
  const double first = std::floor(lowest / tick) * tick;
  return {first, std::max(highest, first + tick), first_at, last_at, tick};
}

std::pair<Axis, Axis> axes_of(const std::vector<LossPoint>& points) {
  const double last_step = points.empty() ? 1 : static_cast<double>(std::max<std::int64_t>(1, points.back().step));
  Axis steps = axis_of(0, last_step, 10, kLeft, kRight);
  steps.tick = std::max(steps.tick, 1.0);
  double lowest = points.empty() ? 0 : points.front().loss, highest = lowest;
  for (const LossPoint& point : points) {
    lowest = std::min(lowest, point.loss);
    highest = std::max(highest, point.loss);
  }
  return {steps, axis_of(lowest, highest, 7, kBottom, kTop)};
}

// Consecutive points with the same number of ranks: [begin, end).
struct Segment {
  std::size_t begin, end;
};

std::vector<Segment> segments_of(const std::vector<LossPoint>& points) {
  std::vector<Segment> segments;
  for (std::size_t i = 0; i < points.size(); ++i) {
    if (i == 0 || points[i].ranks != points[i - 1].ranks) segments.push_back({i, i});
    segments.back().end = i + 1;
  }
  return segments;
}

// 0.5 is printed with one decimal, 20 with none.
int digits_of(double tick) { return std::max(0, static_cast<int>(-std::floor(std::log10(tick) + 1e-9))); }

void draw_axes(std::string& out, const Axis& steps, const Axis& losses) {
  for (int i = 0; losses.first + i * losses.tick <= losses.last; ++i) {
    const double value = losses.first + i * losses.tick, y = losses.at(value);
    out += fmt::format("<line class=\"grid\" x1=\"{}\" y1=\"{:.1f}\" x2=\"{}\" y2=\"{:.1f}\"/>\n", kLeft, y, kRight, y);
    out += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.{}f}</text>\n", kLeft - 10, y + 5, value,
                       digits_of(losses.tick));
  }
  for (int i = 0; steps.first + i * steps.tick <= steps.last; ++i) {
    const double value = steps.first + i * steps.tick, x = steps.at(value);
    out += fmt::format("<line class=\"axis\" x1=\"{:.1f}\" y1=\"{}\" x2=\"{:.1f}\" y2=\"{}\"/>\n", x, kBottom, x,
                       kBottom + 5);
    out += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.0f}</text>\n", x, kBottom + 23, value);
  }
  out +=
      fmt::format("<line class=\"axis\" x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\"/>\n", kLeft, kBottom, kRight, kBottom);
  out +=
      fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">step</text>\n", (kLeft + kRight) / 2, kHeight - 11);
  out += fmt::format("<text class=\"title\" x=\"{}\" y=\"32\">Training loss</text>\n", kLeft);
}

// Starts at the last point of the previous segment, so that there is no gap, and marks that point with a vertical line.
void draw_segment(std::string& out, const std::vector<LossPoint>& points, const Segment& segment,
                  std::string_view colour, const Axis& steps, const Axis& losses) {
  const std::size_t begin = segment.begin > 0 ? segment.begin - 1 : 0;
  if (segment.begin > 0) {
    const double x = steps.at(static_cast<double>(points[begin].step));
    out +=
        fmt::format("<line class=\"seam\" x1=\"{0:.1f}\" y1=\"{1}\" x2=\"{0:.1f}\" y2=\"{2}\"/>\n", x, kTop, kBottom);
  }
  out += fmt::format("<polyline stroke=\"{}\" points=\"", colour);
  for (std::size_t i = begin; i < segment.end; ++i) {
    out += fmt::format("{:.1f},{:.1f} ", steps.at(static_cast<double>(points[i].step)), losses.at(points[i].loss));
  }
  out.back() = '"';
  out += "/>\n";
}

// In the upper right corner, which the curve leaves free.
void draw_legend_entry(std::string& out, const LossPoint& first, const LossPoint& last, std::string_view colour,
                       std::size_t row) {
  const double x = kRight - 244, y = kTop + 22 + 24 * static_cast<double>(row);
  out += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"22\" height=\"4\" rx=\"2\" fill=\"{}\"/>\n", x, y - 7, colour);
  out += fmt::format("<text x=\"{}\" y=\"{}\">{} rank{}, steps {} to {}</text>\n", x + 32, y, first.ranks,
                     first.ranks == 1 ? "" : "s", first.step, last.step);
}

}  // namespace

LossCurve::LossCurve(fs::path file, std::int64_t last_step)
    : file_(std::move(file)), points_(read_points(file_, last_step)) {
  std::string text(kTitleLine);
  for (const LossPoint& point : points_) text += line_of(point);
  replace_file(file_, text);
}

void LossCurve::add(const LossPoint& point) {
  points_.push_back(point);
  std::ofstream out(file_, std::ios::app);
  out << line_of(point) << std::flush;
  if (!out) fail(ErrorCode::io, "append to {}: the write failed", file_.string());
}

std::string loss_plot(const std::vector<LossPoint>& all) {
  std::vector<LossPoint> points;
  std::copy_if(all.begin(), all.end(), std::back_inserter(points),
               [](const LossPoint& p) { return std::isfinite(p.loss); });
  const auto [steps, losses] = axes_of(points);
  std::string out = fmt::format(kHead, kWidth, kHeight);
  draw_axes(out, steps, losses);
  const std::vector<Segment> segments = segments_of(points);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const std::string_view colour = kColours[i % kColours.size()];
    draw_segment(out, points, segments[i], colour, steps, losses);
    draw_legend_entry(out, points[segments[i].begin], points[segments[i].end - 1], colour, i);
  }
  return out + "</svg>\n";
}

void write_loss_plot(const std::vector<LossPoint>& points, const fs::path& file) {
  replace_file(file, loss_plot(points));
}

}  // namespace tessera::examples
