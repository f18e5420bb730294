#include "accelerator/step/picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <utility>

namespace tessera::fsdp {

namespace {

using Kind = Work::Kind;

// In pixels.
constexpr double kWidth = 1000, kLeft = 96, kRight = 12, kLane = 26, kBar = 22, kTitle = 30, kPanelGap = 14;
constexpr double kLegend = 30, kAxis = 42, kLine = 17;
constexpr double kLabelled = 12;  // the least width of a bar with the number of its unit

// All colors have enough contrast on white and on black.
constexpr const char* kStyle = R"(<style>
  text { font: 13px system-ui, sans-serif; fill: #767e88 }
  .title { font-weight: 600 }
  .unit { fill: #fff; font-size: 11px; text-anchor: middle }
  .right { text-anchor: end }
  .middle { text-anchor: middle }
  .lane { fill: #808080; fill-opacity: .13 }
  .grid { stroke: #808080; stroke-opacity: .5 }
  .forward { fill: #3f7fd6 }
  .backward { fill: #2a55a0 }
  .optimizer { fill: #7d62b8 }
  .gather { fill: #c9701a }
  .reduction { fill: #2b8a5b }
  .other { fill: #7d858d }
  .exposed { fill: #e0434f; fill-opacity: .36 }
</style>)";

const char* class_of(Kind kind) {
  switch (kind) {
    case Kind::forward:
      return "forward";
    case Kind::backward:
      return "backward";
    case Kind::optimizer:
      return "optimizer";
    case Kind::gather:
      return "gather";
    case Kind::reduction:
      return "reduction";
    case Kind::other:
      break;
  }
  return "other";
}

// A number with at most one decimal.
std::string px(double value) {
  const double rounded = std::round(value * 10) / 10;
  return rounded == std::round(rounded) ? fmt::format("{:.0f}", rounded) : fmt::format("{:.1f}", rounded);
}

// The lanes of all panels, by stream.
std::map<std::int64_t, std::string> lanes_of(const std::vector<Panel>& panels) {
  std::map<std::int64_t, std::string> lanes{{0, "computation"}};
  for (const Panel& panel : panels) {
    for (const Work& work : panel.step.work) {
      if (work.kind == Kind::gather) lanes[work.stream] = "unshard";
      if (work.kind == Kind::reduction) lanes[work.stream] = "reduce";
      lanes.try_emplace(work.stream, fmt::format("stream {}", work.stream));
    }
  }
  return lanes;
}

class Drawing {
 public:
  Drawing(double seconds, int own_unit)
      : pixels_per_second_((kWidth - kLeft - kRight) / seconds), own_unit_(own_unit) {}

  void text(double x, double y, const std::string& text, const char* of_class = nullptr) {
    add(R"(<text x="{}" y="{}"{}>{}</text>)", px(x), px(y),
        of_class == nullptr ? "" : fmt::format(" class=\"{}\"", of_class), text);
  }
  void rect(double x, double y, double width, double height, const char* of_class) {
    add(R"(<rect x="{}" y="{}" width="{}" height="{}" class="{}"/>)", px(x), px(y), px(width), px(height), of_class);
  }

  void legend(double y) {
    double x = kLeft;
    for (const auto& [name, of_class] : {std::pair("forward", "forward"),
                                         {"backward", "backward"},
                                         {"optimizer", "optimizer"},
                                         {"gather of parameters", "gather"},
                                         {"reduction of gradients", "reduction"},
                                         {"only communication runs", "exposed"}}) {
      rect(x, y, 14, 14, of_class);
      text(x + 19, y + 12, name);
      x += 52 + 6.3 * static_cast<double>(std::string(name).size());
    }
  }

  void panel(const Panel& panel, const std::map<std::int64_t, std::string>& lanes, double y) {
    text(kLeft, y + 19, panel.title, "title");
    const double height = kLane * static_cast<double>(lanes.size());
    double at = y + kTitle;
    for (const auto& [stream, name] : lanes) {
      text(kLeft - 8, at + 16, name, "right");
      rect(kLeft, at, kWidth - kLeft - kRight, kBar, "lane");
      at += kLane;
    }
    for (const sim::Interval& time : panel.step.exposed)
      rect(x_of(time.begin), y + kTitle - 4, width_of(time), height + 4, "exposed");
    at = y + kTitle;
    for (const auto& [stream, name] : lanes) {
      add("<!-- {} -->", name);
      for (const Work& work : panel.step.work) {
        if (work.stream == stream) bar(work, at);
      }
      at += kLane;
    }
  }

  void axis(double y, double seconds) {
    const double step = tick_of(seconds);
    for (double time = 0; time <= seconds; time += step) {
      add(R"(<line x1="{0}" x2="{0}" y1="{1}" y2="{2}" class="grid"/>)", px(x_of(time)), px(y), px(y + 5));
      text(x_of(time), y + 19, fmt::format("{:.1f} ms", time * 1e3), "middle");
    }
  }

  template <typename... Args>
  void add(fmt::format_string<Args...> format, Args&&... arguments) {
    fmt::format_to(std::back_inserter(svg_), format, std::forward<Args>(arguments)...);
    svg_ += '\n';
  }
  std::string take() { return std::move(svg_); }

 private:
  // The distance of ticks: 1, 2 or 5 times a power of ten, so that there are 4 to 10.
  static double tick_of(double seconds) {
    double tick = std::pow(10, std::floor(std::log10(seconds / 4)));
    for (const double factor : {2.0, 2.5}) {
      if (seconds / (tick * factor) >= 4) tick *= factor;
    }
    return tick;
  }
  double x_of(double seconds) const { return kLeft + seconds * pixels_per_second_; }
  double width_of(const sim::Interval& time) const { return time.seconds() * pixels_per_second_; }

  void bar(const Work& work, double y) {
    const double width = width_of(work.time);
    // A gap of a pixel separates bars that touch.
    rect(x_of(work.time.begin), y, std::max(width - 1, 0.6), kBar, class_of(work.kind));
    if (work.unit < 0 || width < kLabelled) return;
    const std::string unit = work.unit == own_unit_ ? "own" : std::to_string(work.unit);
    text(x_of((work.time.begin + work.time.end) / 2), y + 15, unit, "unit");
  }

  double pixels_per_second_;
  int own_unit_;
  std::string svg_;
};

}  // namespace

std::string picture_of(const std::vector<Panel>& panels, int own_unit, const std::vector<std::string>& caption) {
  const std::map<std::int64_t, std::string> lanes = lanes_of(panels);
  double seconds = 0;
  for (const Panel& panel : panels) seconds = std::max(seconds, panel.step.seconds);
  const double panel_height = kTitle + kLane * static_cast<double>(lanes.size()) + kPanelGap;
  const double axis = kLegend + panel_height * static_cast<double>(panels.size()) - kPanelGap;
  const double height = axis + kAxis + kLine * static_cast<double>(caption.size());
  Drawing drawing(seconds, own_unit);
  drawing.add(R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}" height="{}">)", px(kWidth),
              px(height), px(kWidth), px(height));
  drawing.add("{}", std::string(kStyle));
  drawing.legend(6);
  double y = kLegend;
  for (const Panel& panel : panels) {
    drawing.panel(panel, lanes, y);
    y += panel_height;
  }
  drawing.axis(axis, seconds);
  for (std::size_t i = 0; i < caption.size(); ++i)
    drawing.text(kLeft, axis + kAxis + kLine * static_cast<double>(i), caption[i]);
  drawing.add("</svg>");
  return drawing.take();
}

}  // namespace tessera::fsdp
