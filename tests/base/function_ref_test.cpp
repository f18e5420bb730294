#include "tessera/base/function_ref.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace tessera {
namespace {

int twice(int x) { return 2 * x; }
int call(FunctionRef<int(int)> f, int x) { return f(x); }

TEST(FunctionRefTest, CallsWhatItRefersTo) {
  int calls = 0;
  auto count = [&calls, last = 0](int x) mutable {
    ++calls;
    return std::exchange(last, x);
  };
  EXPECT_EQ(call(count, 1), 0);
  EXPECT_EQ(call(count, 2), 1);  // of the same object, which keeps what it counts
  EXPECT_EQ(calls, 2);

  const auto add = [](int x) { return x + 1; };
  const std::function<int(int)> owner = add;
  EXPECT_EQ(call(add, 1), 2);
  EXPECT_EQ(call(owner, 1), 2);
  EXPECT_EQ(call(twice, 3), 6);
  EXPECT_EQ(call(&twice, 3), 6);
}

TEST(FunctionRefTest, PassesArgumentsAndResultsAsTheSignatureStates) {
  const auto take = [](std::unique_ptr<int> x, std::string& text) -> std::string& {
    text += std::to_string(*x);
    return text;
  };
  const FunctionRef<std::string&(std::unique_ptr<int>, std::string&)> f = take;
  std::string text = "x";
  EXPECT_EQ(&f(std::make_unique<int>(7), text), &text);
  EXPECT_EQ(text, "x7");

  const FunctionRef<void(int)> without_result = twice;
  without_result(1);
  const FunctionRef<double(int)> converted = twice;
  EXPECT_EQ(converted(2), 4.0);
  const FunctionRef<void(int)> copy = without_result;  // NOLINT(performance-unnecessary-copy-initialization)
  copy(1);
}

TEST(FunctionRefTest, IsNullIfMadeOfNull) {
  const std::function<int(int)> empty;
  int (*const pointer)(int) = nullptr;
  for (const FunctionRef<int(int)> null :
       {FunctionRef<int(int)>(nullptr), FunctionRef<int(int)>(empty), FunctionRef<int(int)>(pointer)}) {
    EXPECT_FALSE(null);
    EXPECT_THROW(null(1), std::bad_function_call);
  }
  EXPECT_TRUE(FunctionRef<int(int)>(twice));
}

std::string overloaded(FunctionRef<int(int)>) { return "one"; }
std::string overloaded(FunctionRef<int(int, int)>) { return "two"; }

TEST(FunctionRefTest, OverloadsAreChosenByWhatCanBeCalled) {
  EXPECT_EQ(overloaded([](int x) { return x; }), "one");
  EXPECT_EQ(overloaded([](int x, int y) { return x + y; }), "two");
}

}  // namespace
}  // namespace tessera
