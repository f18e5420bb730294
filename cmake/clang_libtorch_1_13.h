// Included in front of everything where clang compiles against LibTorch 1.13. Its ATen/core/ivalue_inl.h has vectors of
// a type that is not complete yet; in C++20, where std::vector is constexpr, clang instantiates their members at once
// and fails. So libstdc++'s std::vector is not constexpr here. Nothing else changes, least of all its layout.

#include <bits/stl_uninitialized.h>

#include <memory>
#include <string>

#undef _GLIBCXX20_CONSTEXPR
#define _GLIBCXX20_CONSTEXPR
#define __fill_a1 __fill_bits  // declared as constexpr before, which clang would refuse to repeat without it
#include <vector>
#undef __fill_a1
#undef _GLIBCXX20_CONSTEXPR
#define _GLIBCXX20_CONSTEXPR constexpr
