// For functions that Python calls, which must not throw.
#pragma once

#include <exception>

namespace nsm {

// What the task gives; `failed` where it throws.
template <typename Result, typename Task>
Result guarded(Result failed, const Task& task) {
  try {
    return task();
  } catch (const std::exception&) {
    return failed;
  }
}

}  // namespace nsm
