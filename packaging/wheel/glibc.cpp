// What newer versions of glibc export in place of what glibc 2.28 has. Linked into the files of the wheel alone, so
// that they run with glibc 2.28 and later although they are linked on a newer system (wheel.cmake). The definitions
// take precedence over glibc's, also for the static libstdc++, and are hidden: no other library sees them.
//
// manylinux.py finds each symbol that is newer and has no definition here.

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#include "first_version.h"

#pragma GCC visibility push(hidden)

#if defined(__x86_64__)
constexpr int kStatVersion = 1;
#else
constexpr int kStatVersion = 0;
#endif

// Declares first_<name>, which is glibc's <name> of its first version for this processor. It is a function of
// libpthread.so.0 up to glibc 2.33, and of libc.so.6 after that, with libpthread.so.0 there still.
#define FIRST(name)                                                     \
  __typeof__(name) first_##name __attribute__((visibility("default"))); \
  __asm__(".symver first_" #name "," #name "@" FIRST_VERSION)

extern "C" {

// --- glibc 2.34: libpthread is in libc

FIRST(pthread_create);
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) noexcept {
  return first_pthread_create(thread, attributes, start, argument);
}
FIRST(pthread_detach);
int pthread_detach(pthread_t thread) noexcept { return first_pthread_detach(thread); }
FIRST(pthread_getspecific);
void* pthread_getspecific(pthread_key_t key) noexcept { return first_pthread_getspecific(key); }
FIRST(pthread_join);
int pthread_join(pthread_t thread, void** result) { return first_pthread_join(thread, result); }
FIRST(pthread_key_create);
int pthread_key_create(pthread_key_t* key, void (*destroy)(void*)) noexcept {
  return first_pthread_key_create(key, destroy);
}
FIRST(pthread_key_delete);
int pthread_key_delete(pthread_key_t key) noexcept { return first_pthread_key_delete(key); }
FIRST(pthread_mutex_trylock);
int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept { return first_pthread_mutex_trylock(mutex); }
FIRST(pthread_once);
int pthread_once(pthread_once_t* once, void (*start)()) { return first_pthread_once(once, start); }
FIRST(pthread_rwlock_rdlock);
int pthread_rwlock_rdlock(pthread_rwlock_t* lock) noexcept { return first_pthread_rwlock_rdlock(lock); }
FIRST(pthread_rwlock_unlock);
int pthread_rwlock_unlock(pthread_rwlock_t* lock) noexcept { return first_pthread_rwlock_unlock(lock); }
FIRST(pthread_rwlock_wrlock);
int pthread_rwlock_wrlock(pthread_rwlock_t* lock) noexcept { return first_pthread_rwlock_wrlock(lock); }
FIRST(pthread_setspecific);
int pthread_setspecific(pthread_key_t key, const void* value) noexcept { return first_pthread_setspecific(key, value); }

// --- glibc 2.35 and 2.29: hypot and exp without the error handling of SVID

double exp(double x) noexcept;
FIRST(exp);
double exp(double x) noexcept { return first_exp(x); }
double hypot(double x, double y) noexcept;
FIRST(hypot);
double hypot(double x, double y) noexcept { return first_hypot(x, y); }

// --- glibc 2.33: stat and others are functions

int __fxstat(int version, int file, struct stat* found) noexcept __attribute__((visibility("default")));
int __lxstat(int version, const char* path, struct stat* found) noexcept __attribute__((visibility("default")));
int __xstat(int version, const char* path, struct stat* found) noexcept __attribute__((visibility("default")));
int fstat(int file, struct stat* found) noexcept { return __fxstat(kStatVersion, file, found); }
int lstat(const char* path, struct stat* found) noexcept { return __lxstat(kStatVersion, path, found); }
int stat(const char* path, struct stat* found) noexcept { return __xstat(kStatVersion, path, found); }
// Of 64-bit processors: struct stat64 is struct stat.
int fstat64(int file, struct stat64* found) noexcept { return fstat(file, reinterpret_cast<struct stat*>(found)); }

// --- glibc 2.32: whether the process has one thread, so that the counts of shared pointers need not be atomic. They
// are atomic.

char __libc_single_threaded = 0;

// --- glibc 2.36: what std::random_device takes from

std::uint32_t arc4random() noexcept {
  std::uint32_t number = 0;
  if (getentropy(&number, sizeof number) != 0) std::abort();
  return number;
}

}  // extern "C"
