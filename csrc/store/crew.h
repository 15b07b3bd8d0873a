// Threads that share a loop. There are many, since they mostly wait for the disk.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace dlrm::store {

class Crew {
 public:
  explicit Crew(int64_t threads) {
    for (int64_t i = 1; i < threads; ++i) threads_.emplace_back([this] { serve(); });
  }

  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  ~Crew() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    begun_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  // Calls work(i) for each i < count; the caller takes part. One loop at a time. Throws the first
  // exception of `work`, after which no further call begins.
  void run(int64_t count, const std::function<void(int64_t)>& work) {
    if (count < 2 || threads_.empty()) {
      for (int64_t i = 0; i < count; ++i) work(i);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      count_ = count;
      next_ = 0;
      busy_ = static_cast<int64_t>(threads_.size());
      ++loop_;
    }
    begun_.notify_all();
    take(work);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
  }

 private:
  void take(const std::function<void(int64_t)>& work) {
    try {
      for (int64_t i = next_++; i < count_; i = next_++) work(i);
    } catch (...) {
      next_ = count_;
      std::lock_guard<std::mutex> lock(mutex_);
      if (!thrown_) thrown_ = std::current_exception();
    }
  }

  void serve() {
    int64_t served = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      begun_.wait(lock, [&] { return ends_ || loop_ != served; });
      if (ends_) return;
      served = loop_;
      const auto* work = work_;
      lock.unlock();
      take(*work);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable begun_, done_;
  const std::function<void(int64_t)>* work_ = nullptr;
  std::atomic<int64_t> next_{0};
  std::exception_ptr thrown_;
  int64_t count_ = 0, busy_ = 0, loop_ = 0;
  bool ends_ = false;
};

}  // namespace dlrm::store
