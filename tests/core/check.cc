#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>
#include <vector>

#include "core/types.h"
#include "tests/check_throws.h"

using namespace kvledger;

namespace {

// What a process that runs `fail` prints on stderr and the signal it dies of.
struct Death {
  std::string text;
  int signal = 0;
};

Death death_of(void (*fail)()) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    std::signal(SIGABRT, SIG_DFL);  // not the test runner's
    fail();
    _exit(0);
  }
  close(ends[1]);
  Death death;
  char part[256];
  for (ssize_t length; (length = read(ends[0], part, sizeof(part))) > 0;) {
    death.text.append(part, static_cast<std::size_t>(length));
  }
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  death.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  return death;
}

// What the check in `fail` reports.
template <class Fail>
std::string message_of(Fail fail) {
  try {
    fail();
  } catch (const testing::BrokenInvariant& broken) {
    return broken.what();
  }
  return "nothing failed";
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

enum class Colour : std::uint8_t { kRed = 3, kBlue = 4 };

}  // namespace

TEST_CASE("a check that holds does nothing and looks at its operands once") {
  // If this fails, checks change what the code under them does.
  int looks = 0;
  KVL_CHECK(++looks == 1);
  KVL_CHECK_EQ(++looks, 2);
  KVL_CHECK_NE(++looks, 2);
  KVL_CHECK_LT(looks, 4);
  KVL_CHECK_LE(looks, 3);
  KVL_CHECK_GT(looks, 2);
  KVL_CHECK_GE(looks, 3);
  CHECK(looks == 3);
}

TEST_CASE("each comparison breaks where it does not hold") {
  // If this fails, an invariant of that kind is never noticed.
  CHECK_BREAKS(KVL_CHECK(false));
  CHECK_BREAKS([] { KVL_CHECK_EQ(1, 2); }());
  CHECK_BREAKS([] { KVL_CHECK_NE(2, 2); }());
  CHECK_BREAKS([] { KVL_CHECK_LT(2, 2); }());
  CHECK_BREAKS([] { KVL_CHECK_LE(3, 2); }());
  CHECK_BREAKS([] { KVL_CHECK_GT(2, 2); }());
  CHECK_BREAKS([] { KVL_CHECK_GE(1, 2); }());
}

TEST_CASE("a failure names its place, its condition and the numbers that disagree") {
  // If this fails, a report from production does not say what went wrong.
  const std::string plain = message_of([] { KVL_CHECK(2 + 2 == 5); });
  CHECK(plain.find("kvledger: broken invariant at ") == 0);
  CHECK(plain.find("check.cc:") != std::string::npos);
  CHECK(ends_with(plain, ": 2 + 2 == 5"));
  CHECK(ends_with(message_of([] { KVL_CHECK_EQ(2 + 2, 5); }), ": 2 + 2 == 5 (4 vs 5)"));
  CHECK(ends_with(message_of([] { KVL_CHECK_LT(BlockCount{7}, BlockCount{-3}); }), "(7 vs -3)"));
  CHECK(ends_with(message_of([] { KVL_CHECK_EQ(BlockId{4294967295}, BlockId{0}); }),
                  "(4294967295 vs 0)"));
  CHECK(ends_with(message_of([] { KVL_CHECK_EQ(Colour::kRed, Colour::kBlue); }), "(3 vs 4)"));
}

TEST_CASE("checked_at gives the element, or breaks past the end") {
  // If this fails, a wrong id reads memory that is somebody else's.
  std::vector<int> three = {1, 2, 3};
  checked_at(three, 2) = 5;
  CHECK(three[2] == 5);
  CHECK_BREAKS(checked_at(three, 3));
  CHECK_BREAKS(checked_at(three, static_cast<std::size_t>(-1)));
  const std::vector<int> none;
  CHECK_BREAKS(checked_at(none, 0));
}

TEST_CASE("setting a handler returns the one before, and none means the one that aborts") {
  // If this fails, a test that installs a handler cannot put the old one back.
  const CheckHandler before = set_check_handler(nullptr);
  const CheckHandler standard = set_check_handler(before);
  CHECK((before == &testing::throw_check_failure));
  CHECK((standard != nullptr));
  CHECK((standard != before));
}

TEST_CASE("without a handler of its own a process prints the failure and aborts") {
  // If this fails, a server goes on with books that are wrong.
  const Death death = death_of([] {
    set_check_handler(nullptr);
    KVL_CHECK_EQ(1, 2);
  });
  CHECK(death.signal == SIGABRT);
  CHECK(death.text.find("1 == 2 (1 vs 2)") != std::string::npos);
}

TEST_CASE("a handler that returns is followed by an abort") {
  // If this fails, a handler that only logs lets the code run on past a broken invariant.
  const Death death = death_of([] {
    set_check_handler([](const CheckFailure&) {});
    KVL_CHECK(false);
  });
  CHECK(death.signal == SIGABRT);
  CHECK(death.text.empty());
}
