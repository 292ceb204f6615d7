// Entry point of every C++ test program. A failed KVL_CHECK throws here, so that a test can ask
// for it; anywhere else it ends the process.

#define DOCTEST_CONFIG_IMPLEMENT
#include "tests/check_throws.h"

int main(int argc, char** argv) {
  kvledger::set_check_handler(&kvledger::testing::throw_check_failure);
  doctest::Context context(argc, argv);
  return context.run();
}
