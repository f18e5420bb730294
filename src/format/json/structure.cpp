#include <algorithm>
#include <utility>
#include <vector>

#include "tessera/base/internal/text_hash.h"
#include "tessera/format/internal/json_structure.h"

namespace tessera::json {

namespace {

using Ordered = nlohmann::ordered_json;

class StructureReader : public Ordered::json_sax_t {
 public:
  bool null() override { return true; }
  bool boolean(bool /*value*/) override { return true; }
  bool number_integer(std::int64_t /*value*/) override { return true; }
  bool number_unsigned(std::uint64_t /*value*/) override { return true; }
  bool number_float(double /*value*/, const std::string& /*text*/) override { return true; }
  bool string(std::string& /*value*/) override { return true; }
  bool binary(Ordered::binary_t& /*value*/) override { return true; }
  bool start_object(std::size_t /*size*/) override { return open(); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t /*size*/) override { return open(); }
  bool end_array() override { return close(); }
  bool key(std::string& value) override {
    if (!keys_.back().insert(value).second && !structure_.duplicate_key) structure_.duplicate_key = value;
    return true;
  }
  bool parse_error(std::size_t /*at*/, const std::string& /*last*/, const Ordered::exception& /*error*/) override {
    return false;
  }

  Structure& structure() { return structure_; }

 private:
  bool open() {
    keys_.emplace_back();
    structure_.depth = std::max(structure_.depth, keys_.size());
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  Structure structure_;
  std::vector<TextSet> keys_;  // of each open array, without any, and object
};

class OrderedReader final : public StructureReader {
 public:
  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(std::int64_t value) override { return add(value); }
  bool number_unsigned(std::uint64_t value) override { return add(value); }
  bool number_float(double value, const std::string& /*text*/) override { return add(value); }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool start_object(std::size_t size) override {
    return StructureReader::start_object(size) && open(Ordered::object());
  }
  bool end_object() override { return close() && StructureReader::end_object(); }
  bool start_array(std::size_t size) override { return StructureReader::start_array(size) && open(Ordered::array()); }
  bool end_array() override { return close() && StructureReader::end_array(); }
  bool key(std::string& value) override {
    StructureReader::key(value);
    key_ = std::move(value);
    return true;
  }

  Ordered root;

 private:
  bool add(Ordered element) {
    if (around_.empty()) {
      root = std::move(element);
    } else if (around_.back()->is_array()) {
      around_.back()->push_back(std::move(element));
    } else {
      add_member(*around_.back(), std::move(key_), std::move(element));
    }
    return true;
  }
  // A container stays where it is in memory while it is the last element of those around it.
  bool open(Ordered container) {
    add(std::move(container));
    around_.push_back(around_.empty() ? &root : &around_.back()->back());
    return true;
  }
  bool close() {
    around_.pop_back();
    return true;
  }

  std::vector<Ordered*> around_;
  std::string key_;
};

}  // namespace

Structure structure_of(std::string_view text) {
  StructureReader reader;
  Ordered::sax_parse(text, &reader);
  return std::move(reader.structure());
}

OrderedJson parse_ordered(std::string_view text) {
  OrderedReader reader;
  if (!Ordered::sax_parse(text, &reader)) reader.root = Ordered(Ordered::value_t::discarded);
  return {std::move(reader.root), std::move(reader.structure())};
}

void add_member(Ordered& object, std::string key, Ordered value) {
  object.get_ref<Ordered::object_t&>().emplace_back(std::move(key), std::move(value));
}

}  // namespace tessera::json
