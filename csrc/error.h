// The thread's error message, and the one way to set it.
#pragma once

namespace tilepress {

// Formats the calling thread's message, cut at 511 characters, and returns `code`, so that a refusal is one statement.
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace tilepress
