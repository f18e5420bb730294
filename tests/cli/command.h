#pragma once
// Runs the real command, under conditions that a test chooses.

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

struct Outcome {
  int status = -1;  // exit status; 128 + number of the signal that ended it
  std::string out, err;
};

struct Conditions {
  std::string stdout_file;                         // write standard output there
  bool stdout_closed_pipe = false;                 // a pipe whose read end is closed
  bool stdout_non_blocking = false;                // a pipe of 4 KiB to which writes do not wait
  bool stderr_small = false;                       // standard error is a pipe of 4 KiB
  bool without_root_rights = false;                // file modes are enforced, also for root
  std::optional<unsigned short> terminal_columns;  // standard output is a terminal of that width
  std::map<std::string, std::string> environment;  // set these
  std::vector<int> closed;                         // these descriptors are closed
  std::optional<std::uint64_t> max_file;           // the largest file that can be written, as on a full disk
};

// Runs tessera. `arguments` do not include the name of the program.
Outcome run_tessera(const std::vector<std::string>& arguments, const Conditions& conditions = {});

// The same for any program, found by PATH.
Outcome run_program(const std::vector<std::string>& command, const Conditions& conditions = {});

// A running command. Its output stays in small pipes until `finish`.
class Running {
 public:
  explicit Running(const std::vector<std::string>& arguments, const Conditions& conditions = {});
  ~Running();
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  void wait_for_output() const;
  void wait_for_errors() const;
  // Waits until it has read `bytes`, as counted by the kernel; returns false after 30 seconds.
  bool wait_until_it_has_read(std::uint64_t bytes) const;
  void signal(int number) const;
  bool has_ended() const;
  // Waits until it has ended; returns false after two minutes. Its output is not read.
  bool wait_until_it_has_ended() const;
  Outcome finish();

 private:
  pid_t pid_ = -1;
  int out_ = -1, err_ = -1;
};

// Returns the sorted names of the entries of a folder, including hidden ones.
std::vector<std::string> names_in(const std::filesystem::path& folder);

// tests/golden/checkpoints/<name>/ck
std::string golden(const std::string& name);

// tests/golden/demo/ck: a small GPT with its optimizer, saved by four ranks.
std::string demo();

std::string read_text(const std::filesystem::path& path);
void write_text(const std::filesystem::path& path, const std::string& text);

// Writes a sparse safetensors file of `tensors` tensors of `bytes` zeros each, which takes no space on disk.
void write_sparse_safetensors(const std::filesystem::path& path, int tensors, std::uint64_t bytes);

// Every error message must be one line that begins with "tessera: ".
bool is_one_error_line(const std::string& text);

}  // namespace tessera::testing
