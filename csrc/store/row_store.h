// Rows of tables in a file, some of which are in memory, in slots of the trained tensors.
//
// A record has the bytes of a row in all fields (weights, state of the optimizer), side by side,
// then the generation that it was written in and a CRC-32C. Records do not cross pages where they
// are smaller than one. Batches are prepared in one thread and used in another: a slot is evicted
// only when no prepared batch uses it. Before a record is overwritten for the first time in a
// generation, its old content goes to that generation's undo file, which is synced first.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "crc32c.h"
#include "crew.h"
#include "slot_map.h"

namespace dlrm::store {

inline constexpr int64_t kPage = 4096;
inline constexpr uint32_t kUndoChunk = 0x4F444E55;  // "UNDO"
inline constexpr int64_t kUndoChunkHeader = 16;     // magic, entries, CRC of both, zero
inline constexpr int64_t kUndoChunkBytes = 4 << 20;
inline constexpr int64_t kRecordsPerTask = 16;

// A batch needs more slots than are free: `held` are those that other batches use.
struct Full {
  int64_t needed, held;
};

// The content of a record is not whole, in the rows or in an undo file.
struct Damaged {
  int64_t record;
  bool undo;
};

// The kernel refused to read or write the rows or an undo file.
struct DiskError {
  int error;
  bool undo;
};

// A tensor [slots, ...] as the store sees it: bytes of a row. No data: the field is not read.
struct Field {
  char* data;
  int64_t bytes;
};

struct Counters {
  int64_t reads = 0, writes = 0, undone = 0, hits = 0, dirty = 0;
};

// Where records are in a file.
struct RecordLayout {
  explicit RecordLayout(int64_t payload)
      : payload(payload), bytes(payload + 8), stride((bytes + 15) / 16 * 16) {
    if (stride > kPage) stride = (stride + 511) / 512 * 512;
    per_page = std::max<int64_t>(kPage / stride, 1);
    page = stride > kPage ? stride : kPage;
  }

  int64_t offset(int64_t record) const {
    return record / per_page * page + record % per_page * stride;
  }

  int64_t file_bytes(int64_t records) const { return (records + per_page - 1) / per_page * page; }

  void seal(int64_t record, uint32_t generation, char* data) const {
    std::memcpy(data + payload, &generation, 4);
    const uint32_t crc = crc32c(static_cast<uint32_t>(record), data, payload + 4);
    std::memcpy(data + payload + 4, &crc, 4);
  }

  bool whole(int64_t record, const char* data) const {
    uint32_t crc;
    std::memcpy(&crc, data + payload + 4, 4);
    return crc == crc32c(static_cast<uint32_t>(record), data, payload + 4);
  }

  uint32_t generation(const char* data) const {
    uint32_t found;
    std::memcpy(&found, data + payload, 4);
    return found;
  }

  int64_t payload, bytes, stride, per_page, page;
};

class RowStore {
 public:
  RowStore(int file, int64_t records, int64_t slots, std::vector<Field> fields, int64_t threads)
      : file_(file),
        records_(records),
        slots_(slots),
        fields_(std::move(fields)),
        layout_(payload_of(fields_)),
        map_(slots),
        record_of_(slots, -1),
        uses_(slots, 0),
        seen_(slots, 0),
        flags_(slots, 0),
        free_(slots),
        crew_(threads) {}

  const RecordLayout& layout() const { return layout_; }
  const std::vector<Field>& fields() const { return fields_; }
  Counters counters() {
    std::lock_guard<std::mutex> lock(meta_);
    return counters_;
  }

  // Finds slots for the records of a batch, and reads those that are not in memory. The batch,
  // whose number is returned, keeps its slots until it is released. Throws Full and changes nothing
  // if fewer than `reserve` slots would be left for others.
  int64_t prepare(const int64_t* records, int64_t count, int64_t reserve, int64_t* slots) {
    std::lock_guard<std::mutex> working(work_);
    if (failure_) std::rethrow_exception(failure_);
    std::vector<Move> writes, reads;
    int64_t ticket;
    {
      std::lock_guard<std::mutex> lock(meta_);
      place(records, count, reserve, slots, &writes, &reads);
      ticket = ticket_;
    }
    write_back(writes);
    try {
      read(reads);
    } catch (const Damaged&) {
      if (!failure_) withdraw(reads);
      throw;
    }
    return ticket;
  }

  // Announces that the batch's rows will be changed.
  void mark(int64_t ticket) {
    std::lock_guard<std::mutex> lock(meta_);
    for (const int32_t slot : tickets_.at(ticket)) {
      counters_.dirty += !(flags_[slot] & kDirty);
      flags_[slot] |= kDirty;
    }
  }

  // Releases the batch after use.
  void release(int64_t ticket) {
    std::lock_guard<std::mutex> lock(meta_);
    for (const int32_t slot : tickets_.at(ticket)) {
      if (--uses_[slot] == 0) ++free_;
    }
    tickets_.erase(ticket);
  }

  // Writes all rows that have been changed, and waits for the disk.
  void flush() {
    std::lock_guard<std::mutex> working(work_);
    if (failure_) std::rethrow_exception(failure_);
    std::vector<Move> writes;
    {
      std::lock_guard<std::mutex> lock(meta_);
      for (int64_t slot = 0; slot < slots_; ++slot) {
        if (flags_[slot] & kDirty) writes.push_back(clean(slot));
      }
    }
    write_back(writes);
    sync(file_);
  }

  // From now on records are of this generation; old content goes to `undo` from `size` on, or,
  // where `undo` is -1, nowhere.
  void begin(int undo, int64_t size, uint32_t generation) {
    std::lock_guard<std::mutex> working(work_);
    undo_ = undo;
    undo_size_ = size;
    generation_ = generation;
    undone_.assign(undo < 0 ? 0 : (records_ + 63) / 64, 0);
  }

  // Writes rows to the file; `data[i]` has field i of `count` records from `first` on, or is null
  // for zeros.
  void fill(int64_t first, int64_t count, const std::vector<const char*>& data) {
    std::lock_guard<std::mutex> working(work_);
    const int64_t most = std::max<int64_t>((1 << 20) / layout_.page, 1) * layout_.per_page;
    std::vector<char> buffer;
    for (int64_t begin = first; begin < first + count;) {
      const int64_t end = std::min((begin / most + 1) * most, first + count);
      const int64_t start = layout_.offset(begin);
      buffer.assign(layout_.offset(end - 1) + layout_.bytes - start, 0);
      for (int64_t record = begin; record < end; ++record) {
        char* target = buffer.data() + layout_.offset(record) - start;
        for (size_t i = 0; i < fields_.size(); target += fields_[i].bytes, ++i) {
          const int64_t bytes = fields_[i].bytes;
          if (data[i]) std::memcpy(target, data[i] + (record - first) * bytes, bytes);
        }
        layout_.seal(record, generation_, target - layout_.payload);
      }
      write_at(file_, buffer.data(), static_cast<int64_t>(buffer.size()), start);
      begin = end;
    }
  }

  // Reads the fields of `count` records from `first` on, `[count, payload]`.
  void read_range(int64_t first, int64_t count, char* output) {
    std::lock_guard<std::mutex> working(work_);
    if (count == 0) return;
    const int64_t start = layout_.offset(first);
    std::vector<char> buffer(layout_.offset(first + count - 1) + layout_.bytes - start);
    read_at(file_, buffer.data(), static_cast<int64_t>(buffer.size()), start);
    std::vector<char> old(layout_.bytes);
    for (int64_t record = first; record < first + count; ++record) {
      const char* data = buffer.data() + layout_.offset(record) - start;
      if (const auto found = overlay_.find(record); found != overlay_.end()) {
        const auto [undo, offset] = found->second;
        read_at(undo, old.data(), layout_.bytes, offset);
        data = old.data();
      }
      if (!valid(record, data)) throw Damaged{record, data == old.data()};
      std::memcpy(output + (record - first) * layout_.payload, data, layout_.payload);
    }
  }

  // Reads records, possibly from undo files, as of generation `generation`: if a record has several
  // contents, the one added first counts.
  void look_back(uint32_t generation) {
    std::lock_guard<std::mutex> working(work_);
    newest_ = generation;
  }

  void add_overlay(int undo, int64_t count, const int64_t* records, const int64_t* offsets) {
    std::lock_guard<std::mutex> working(work_);
    for (int64_t i = 0; i < count; ++i) overlay_.try_emplace(records[i], undo, offsets[i]);
  }

  // Writes old content of records from an undo file back to the rows.
  void restore(int undo, int64_t count, const int64_t* records, const int64_t* offsets) {
    std::lock_guard<std::mutex> working(work_);
    crew_.run((count + kRecordsPerTask - 1) / kRecordsPerTask, [&](int64_t task) {
      std::vector<char> data(layout_.bytes);
      const int64_t end = std::min((task + 1) * kRecordsPerTask, count);
      for (int64_t i = task * kRecordsPerTask; i < end; ++i) {
        read_at(undo, data.data(), layout_.bytes, offsets[i]);
        if (!layout_.whole(records[i], data.data())) fail(Damaged{records[i], true});
        write_at(file_, data.data(), layout_.bytes, layout_.offset(records[i]));
      }
    });
    sync(file_);
  }

 private:
  enum Flag : uint8_t { kDirty = 1, kRecent = 2 };

  struct Move {
    int64_t record;
    int32_t slot;
  };

  static int64_t payload_of(const std::vector<Field>& fields) {
    int64_t total = 0;
    for (const auto& field : fields) total += field.bytes;
    return total;
  }

  // Finds or makes slots for the records of a batch.
  void place(const int64_t* records, int64_t count, int64_t reserve, int64_t* slots,
             std::vector<Move>* writes, std::vector<Move>* reads) {
    const uint32_t now = static_cast<uint32_t>(++ticket_);
    std::vector<int32_t> used;
    std::vector<int64_t> missing;
    constexpr int64_t kAhead = 8;
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) map_.prefetch(records[i + kAhead]);
      const int32_t slot = map_.find(records[i]);
      slots[i] = slot;
      if (slot < 0) {
        missing.push_back(records[i]);
      } else if (seen_[slot] != now) {
        use(slot, now, &used);
      }
    }
    std::sort(missing.begin(), missing.end());
    missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
    const int64_t needed = static_cast<int64_t>(missing.size());
    if (needed + reserve > free_) {
      for (const int32_t slot : used) {
        seen_[slot] = 0;
        if (--uses_[slot] == 0) ++free_;
      }
      throw Full{needed + static_cast<int64_t>(used.size()), slots_ - free_};
    }
    counters_.hits += static_cast<int64_t>(used.size());
    for (const int64_t record : missing) {
      const int32_t slot = vacate(writes);
      map_.insert(record, slot);
      record_of_[slot] = record;
      use(slot, now, &used);
      reads->push_back({record, slot});
    }
    if (undo_ >= 0 && !writes->empty()) clean_ahead(writes);
    for (int64_t i = 0; i < count; ++i) {
      if (slots[i] < 0) slots[i] = map_.find(records[i]);
    }
    tickets_[ticket_] = std::move(used);
  }

  // Frees the slots of the batch placed last, whose rows could not be read.
  void withdraw(const std::vector<Move>& reads) {
    release(ticket_);
    std::lock_guard<std::mutex> lock(meta_);
    for (const auto& move : reads) {
      map_.erase(move.record);
      record_of_[move.slot] = -1;
      flags_[move.slot] = 0;
    }
  }

  void use(int32_t slot, uint32_t now, std::vector<int32_t>* used) {
    seen_[slot] = now;
    flags_[slot] |= kRecent;
    if (uses_[slot]++ == 0) --free_;
    used->push_back(slot);
  }

  // Returns a slot that no batch uses, without a record. There must be one.
  int32_t vacate(std::vector<Move>* writes) {
    while (unused_ < slots_) {
      const int64_t slot = unused_++;
      if (record_of_[slot] < 0) return static_cast<int32_t>(slot);
    }
    while (true) {  // clock algorithm: recently used rows stay for one more turn of the hand
      const int64_t slot = hand_;
      hand_ = hand_ + 1 == slots_ ? 0 : hand_ + 1;
      if (uses_[slot] > 0) continue;
      if (flags_[slot] & kRecent) {
        flags_[slot] &= ~kRecent;
        continue;
      }
      if (flags_[slot] & kDirty) writes->push_back(clean(slot));
      if (record_of_[slot] >= 0) map_.erase(record_of_[slot]);
      return static_cast<int32_t>(slot);
    }
  }

  // Also writes the rows that the hand reaches next, so that the undo file is synced less often.
  void clean_ahead(std::vector<Move>* writes) {
    const int64_t most = std::min<int64_t>(slots_ / 4, 1 << 16);
    for (int64_t i = 0, slot = hand_; i < most; ++i, slot = slot + 1 == slots_ ? 0 : slot + 1) {
      if (uses_[slot] == 0 && flags_[slot] == kDirty) writes->push_back(clean(slot));
    }
  }

  Move clean(int64_t slot) {
    flags_[slot] &= ~kDirty;
    --counters_.dirty;
    return {record_of_[slot], static_cast<int32_t>(slot)};
  }

  // Writes rows of slots that do not change meanwhile.
  void write_back(std::vector<Move>& writes) {
    if (writes.empty()) return;
    std::sort(writes.begin(), writes.end(),
              [](const Move& a, const Move& b) { return a.record < b.record; });
    if (undo_ >= 0) save_old(writes);
    each(writes, [&](const Move& move, char* data) {
      char* target = data;
      for (const auto& field : fields_) {
        std::memcpy(target, field.data + move.slot * field.bytes, field.bytes);
        target += field.bytes;
      }
      layout_.seal(move.record, generation_, data);
      write_at(file_, data, layout_.bytes, layout_.offset(move.record));
    });
    std::lock_guard<std::mutex> lock(meta_);
    counters_.writes += static_cast<int64_t>(writes.size());
  }

  // Appends the records' content on disk to the undo file, and waits until it is written.
  void save_old(const std::vector<Move>& writes) {
    std::vector<Move> fresh;
    for (const auto& move : writes) {
      if (!(undone_[move.record / 64] >> (move.record % 64) & 1)) fresh.push_back(move);
    }
    if (fresh.empty()) return;
    const int64_t entry = 8 + layout_.bytes;
    const int64_t most = std::max<int64_t>(kUndoChunkBytes / entry, 1);
    std::vector<char> chunk;
    for (int64_t begin = 0; begin < static_cast<int64_t>(fresh.size()); begin += most) {
      const int64_t count = std::min<int64_t>(most, fresh.size() - begin);
      chunk.assign(kUndoChunkHeader + count * entry, 0);
      const uint32_t head[2] = {kUndoChunk, static_cast<uint32_t>(count)};
      const uint32_t crc = crc32c(0, reinterpret_cast<const char*>(head), 8);
      std::memcpy(chunk.data(), head, 8);
      std::memcpy(chunk.data() + 8, &crc, 4);
      crew_.run((count + kRecordsPerTask - 1) / kRecordsPerTask, [&](int64_t task) {
        const int64_t end = std::min((task + 1) * kRecordsPerTask, count);
        for (int64_t i = task * kRecordsPerTask; i < end; ++i) {
          const int64_t record = fresh[begin + i].record;
          char* target = chunk.data() + kUndoChunkHeader + i * entry;
          std::memcpy(target, &record, 8);
          read_at(file_, target + 8, layout_.bytes, layout_.offset(record));
          if (!layout_.whole(record, target + 8)) fail(Damaged{record, false});
        }
      });
      const int64_t size = static_cast<int64_t>(chunk.size());
      write_at(undo_, chunk.data(), size, undo_size_);
      undo_size_ += size;
    }
    sync(undo_);
    for (const auto& move : fresh) undone_[move.record / 64] |= uint64_t{1} << (move.record % 64);
    std::lock_guard<std::mutex> lock(meta_);
    counters_.undone += static_cast<int64_t>(fresh.size());
  }

  // Reads rows into slots that nobody uses yet.
  void read(const std::vector<Move>& reads) {
    each(reads, [&](const Move& move, char* data) {
      int file = file_;
      int64_t offset = layout_.offset(move.record);
      const auto found = overlay_.find(move.record);
      if (found != overlay_.end()) std::tie(file, offset) = found->second;
      read_at(file, data, layout_.bytes, offset);
      if (!valid(move.record, data)) {
        const Damaged damaged{move.record, file != file_};
        // Rows read from another process's store may have been overwritten meanwhile.
        if (newest_ < UINT32_MAX) throw damaged;
        fail(damaged);
      }
      const char* source = data;
      for (const auto& field : fields_) {
        if (field.data) std::memcpy(field.data + move.slot * field.bytes, source, field.bytes);
        source += field.bytes;
      }
    });
    std::lock_guard<std::mutex> lock(meta_);
    counters_.reads += static_cast<int64_t>(reads.size());
  }

  template <typename Work>
  void each(const std::vector<Move>& moves, const Work& work) {
    const int64_t count = static_cast<int64_t>(moves.size());
    crew_.run((count + kRecordsPerTask - 1) / kRecordsPerTask, [&](int64_t task) {
      thread_local std::vector<char> data;
      data.resize(layout_.bytes);
      const int64_t end = std::min((task + 1) * kRecordsPerTask, count);
      for (int64_t i = task * kRecordsPerTask; i < end; ++i) work(moves[i], data.data());
    });
  }

  bool valid(int64_t record, const char* data) const {
    return layout_.whole(record, data) && layout_.generation(data) <= newest_;
  }

  void read_at(int file, char* data, int64_t size, int64_t offset) {
    while (size > 0) {
      const ssize_t got = pread(file, data, size, offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail(DiskError{errno, file != file_});
      if (got == 0) {
        std::memset(data, 0, size);  // which no checksum fits
        return;
      }
      data += got, size -= got, offset += got;
    }
  }

  void write_at(int file, const char* data, int64_t size, int64_t offset) {
    while (size > 0) {
      const ssize_t done = pwrite(file, data, size, offset);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) fail(DiskError{errno, file != file_});
      data += done, size -= done, offset += done;
    }
  }

  void sync(int file) {
    if (fdatasync(file)) fail(DiskError{errno, file != file_});
  }

  // Throws an error that ends the use of the store: later batches and flushes throw it again.
  template <typename Error>
  [[noreturn]] void fail(const Error& error) {
    std::lock_guard<std::mutex> lock(meta_);
    if (!failure_) failure_ = std::make_exception_ptr(error);
    throw error;
  }

  const int file_;
  const int64_t records_, slots_;
  const std::vector<Field> fields_;
  const RecordLayout layout_;
  std::mutex work_;  // held while rows are read and written
  std::mutex meta_;  // held while slots are given and taken, and never while the disk is awaited
  SlotMap map_;
  std::vector<int64_t> record_of_;  // slot -> record, or -1
  std::vector<int32_t> uses_;       // slot -> batches that use it
  std::vector<uint32_t> seen_;      // slot -> the last batch that it was given to
  std::vector<uint8_t> flags_;
  std::unordered_map<int64_t, std::vector<int32_t>> tickets_;
  int64_t ticket_ = 0, free_, hand_ = 0, unused_ = 0;
  int undo_ = -1;
  int64_t undo_size_ = 0;
  uint32_t generation_ = 0, newest_ = UINT32_MAX;
  std::vector<uint64_t> undone_;  // a bit a record: its old content is in the undo file
  std::unordered_map<int64_t, std::pair<int, int64_t>> overlay_;
  std::exception_ptr failure_;
  Counters counters_;
  Crew crew_;
};

}  // namespace dlrm::store
