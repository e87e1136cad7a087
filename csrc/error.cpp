#include "error.h"

#include <cstdarg>
#include <cstdio>

#include "tilepress.h"

namespace tilepress {
namespace {
thread_local char message[512] = "";
}  // namespace

int fail(int code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return code;
}

}  // namespace tilepress

extern "C" const char *tilepress_last_error(void) { return tilepress::message; }
