#pragma once
// Kills a process at each of its system calls that change files, so that a test sees every state that a kill can leave.

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "support/child_process.h"
#include "tessera/base/function_ref.h"

namespace tessera::testing {

// What a change of files is, for tests of their order.
enum class FileChange : std::uint8_t { rename, remove, sync, other };

// Returns the kind of a system call, or other; `changes` tells whether it changes files at all.
inline FileChange file_change(std::uint64_t number, bool& changes) {
  const auto is = [&](std::initializer_list<long> numbers) {
    return std::any_of(numbers.begin(), numbers.end(), [&](long one) { return number == std::uint64_t(one); });
  };
  changes = true;
#ifdef SYS_rename  // older calls, which not every architecture has
  if (is({SYS_rename})) return FileChange::rename;
  if (is({SYS_unlink, SYS_rmdir})) return FileChange::remove;
  if (is({SYS_mkdir})) return FileChange::other;
#endif
  if (is({SYS_renameat, SYS_renameat2})) return FileChange::rename;
  if (is({SYS_unlinkat})) return FileChange::remove;
  if (is({SYS_fsync, SYS_fdatasync})) return FileChange::sync;
  changes = is({SYS_write, SYS_pwrite64, SYS_ftruncate, SYS_fallocate, SYS_mkdirat});
  return FileChange::other;
}

struct KilledRun {
  bool was_killed = false;          // false: it ended before the call
  int status = 0;                   // of waitpid, if it ended
  std::vector<FileChange> changes;  // before the kill
};

// Runs `f` in a child process and kills that before it makes its call number `n` (from 0) that changes files. Calls of
// threads that `f` starts are not counted. Throws if processes cannot be traced here.
inline KilledRun run_killed_at_change(std::size_t n, FunctionRef<void()> f) {
  const pid_t child = start_child([&] {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(77);
    ::raise(SIGSTOP);
    f();
  });
  KilledRun run;
  int status = 0;
  if (::waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) throw std::runtime_error("ptrace");
  ::ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
  for (int signal = 0;; signal = 0) {
    ::ptrace(PTRACE_SYSCALL, child, nullptr, signal);
    if (::waitpid(child, &status, 0) != child) throw std::runtime_error("waitpid");
    if (!WIFSTOPPED(status)) {
      run.status = status;
      return run;
    }
    if (WSTOPSIG(status) != (SIGTRAP | 0x80)) {
      signal = WSTOPSIG(status);
      continue;
    }
    __ptrace_syscall_info info = {};
    if (::ptrace(PTRACE_GET_SYSCALL_INFO, child, sizeof(info), &info) < 0) throw std::runtime_error("ptrace");
    bool changes = false;
    if (info.op != PTRACE_SYSCALL_INFO_ENTRY) continue;
    const FileChange change = file_change(info.entry.nr, changes);
    if (!changes) continue;
    if (run.changes.size() == n) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      run.was_killed = true;
      return run;
    }
    run.changes.push_back(change);
  }
}

}  // namespace tessera::testing
