#pragma once
// Runs the real command, in conditions that a test chooses.

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

struct Outcome {
  int status = -1;  // exit status; 128 + number where a signal ended it
  std::string out, err;
};

struct Conditions {
  std::string stdout_file;                         // write standard output there
  bool stdout_closed_pipe = false;                 // a pipe that nobody reads any more
  bool without_root_rights = false;                // file modes count, also for root
  std::optional<unsigned short> terminal_columns;  // standard output is a terminal of that width
  std::map<std::string, std::string> environment;  // set these
  std::vector<int> closed;                         // these descriptors are closed
  std::optional<std::uint64_t> max_file;           // largest file that may be written, as on a full disk
};

// `arguments` without the program's name.
Outcome run_tessera(const std::vector<std::string>& arguments, const Conditions& conditions = {});

// The same for any program, found by PATH.
Outcome run_program(const std::vector<std::string>& command, const Conditions& conditions = {});

// A running command, whose output is kept in small pipes until `finish`.
class Running {
 public:
  explicit Running(const std::vector<std::string>& arguments);
  ~Running();
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  void wait_for_output() const;
  // Until it has read that much, by the kernel's count; false if that takes too long.
  bool wait_until_it_has_read(std::uint64_t bytes) const;
  void signal(int number) const;
  Outcome finish();

 private:
  pid_t pid_ = -1;
  int out_ = -1, err_ = -1;
};

// Sorted names of what is in a folder, hidden files included.
std::vector<std::string> names_in(const std::filesystem::path& folder);

// tests/golden/checkpoints/<name>/ck
std::string golden(const std::string& name);

std::string read_text(const std::filesystem::path& path);
void write_text(const std::filesystem::path& path, const std::string& text);

// A safetensors file of `tensors` tensors of `bytes` zeros each that takes no room on the disk.
void write_sparse_safetensors(const std::filesystem::path& path, int tensors, std::uint64_t bytes);

// What every message of ours must be: one line, beginning with "tessera: ".
bool is_one_error_line(const std::string& text);

}  // namespace tessera::testing
