// Kills its process at one of the calls that change files below a directory; see killing.py.
//
// The kernel sends a signal instead of doing these calls (seccomp), and the handler counts and then
// does them. So every call is seen, also those of libraries that do not go through libc. Calls are
// counted from 1 from `shim_arm` on. The process dies instead of call `at`, or, where that is a
// write and `half` is set, once half of its bytes are written. fsync is counted and not done: what
// a killed process has written the kernel still has.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

// The system calls at `shim_syscall_end` are ours and are let through.
long shim_syscall(long number, long, long, long, long, long, long);
extern const char shim_syscall_end[];

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
__asm__(
    ".text\n.globl shim_syscall\nshim_syscall:\n"
    "mov %rdi, %rax\nmov %rsi, %rdi\nmov %rdx, %rsi\nmov %rcx, %rdx\nmov %r8, %r10\nmov %r9, %r8\n"
    "mov 8(%rsp), %r9\nsyscall\n.globl shim_syscall_end\nshim_syscall_end:\nret\n");
static const int kArguments[] = {REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8, REG_R9};
#define REGISTER(context, index) (context)->uc_mcontext.gregs[kArguments[index]]
#define RESULT(context) (context)->uc_mcontext.gregs[REG_RAX]
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
__asm__(
    ".text\n.globl shim_syscall\nshim_syscall:\n"
    "mov x8, x0\nmov x0, x1\nmov x1, x2\nmov x2, x3\nmov x3, x4\nmov x4, x5\nmov x5, x6\n"
    "svc #0\n.globl shim_syscall_end\nshim_syscall_end:\nret\n");
#define REGISTER(context, index) (context)->uc_mcontext.regs[index]
#define RESULT(context) (context)->uc_mcontext.regs[0]
#else
#error "expected x86-64 or AArch64"
#endif

// Where a call says what it changes: a path after a directory's descriptor, or a descriptor.
typedef struct {
  int number;
  char kind;      // w write, o open, r rename, l link, m make, u unlink, t truncate, s fsync
  int directory;  // argument with the directory's descriptor; -1: the working directory
  int path;       // argument with the path; -1: `directory` has a file's descriptor
} Call;

static const Call kCalls[] = {
    {SYS_write, 'w', 0, -1},     {SYS_pwrite64, 'w', 0, -1},
    {SYS_writev, 'w', 0, -1},    {SYS_pwritev, 'w', 0, -1},
    {SYS_pwritev2, 'w', 0, -1},  {SYS_sendfile, 'w', 0, -1},
    {SYS_ftruncate, 't', 0, -1}, {SYS_fallocate, 't', 0, -1},
    {SYS_truncate, 't', -1, 0},  {SYS_copy_file_range, 'w', 2, -1},
    {SYS_fsync, 's', 0, -1},     {SYS_fdatasync, 's', 0, -1},
    {SYS_openat, 'o', 0, 1},     {SYS_renameat2, 'r', 2, 3},
    {SYS_renameat, 'r', 2, 3},   {SYS_linkat, 'l', 2, 3},
    {SYS_symlinkat, 'l', 1, 2},  {SYS_mkdirat, 'm', 0, 1},
    {SYS_unlinkat, 'u', 0, 1},
#ifdef SYS_open  // which newer architectures do not have
    {SYS_open, 'o', -1, 0},      {SYS_creat, 'o', -1, 0},
    {SYS_rename, 'r', -1, 1},    {SYS_link, 'l', -1, 1},
    {SYS_symlink, 'l', -1, 1},   {SYS_mkdir, 'm', -1, 0},
    {SYS_unlink, 'u', -1, 0},    {SYS_rmdir, 'u', -1, 0},
#endif
};
enum { kNumCalls = sizeof kCalls / sizeof *kCalls, kMaxCounted = 1 << 20 };

static char prefix[PATH_MAX];
static size_t prefix_length;
static long at, num_counted;
static int half_of_writes;
static char kinds[kMaxCounted + 1];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// A letter for each call so far.
const char* shim_calls(void) { return kinds; }

static int is_below(const char* path) {
  return strncmp(path, prefix, prefix_length) == 0 &&
         (path[prefix_length] == '/' || path[prefix_length] == 0);
}

// Writes where a descriptor leads; -1 where that cannot be told.
static ssize_t read_descriptor(int descriptor, char* path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  if (descriptor == AT_FDCWD) strcpy(link, "/proc/self/cwd");
  ssize_t length = readlink(link, path, PATH_MAX - 1);
  if (length >= 0) path[length] = 0;
  return length;
}

static int is_wanted(const Call* call, const long* arguments) {
  if (call->number == SYS_openat && !(arguments[2] & (O_CREAT | O_TRUNC))) return 0;
#ifdef SYS_open
  if (call->number == SYS_open && !(arguments[1] & (O_CREAT | O_TRUNC))) return 0;
#endif
  char whole[2 * PATH_MAX] = "";
  int descriptor = call->directory < 0 ? AT_FDCWD : (int)arguments[call->directory];
  if (call->path < 0) return read_descriptor(descriptor, whole) >= 0 && is_below(whole);
  const char* path = (const char*)arguments[call->path];
  if (path[0] == '/') return is_below(path);
  ssize_t length = read_descriptor(descriptor, whole);
  if (length < 0) return 0;
  snprintf(whole + length, sizeof whole - length, "/%s", path);
  return is_below(whole);
}

static long perform(int number, const long* a) {
  return shim_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

static void write_half(int number, const long* arguments) {
  long half[6];
  memcpy(half, arguments, sizeof half);
  struct iovec first;
  int size = number == SYS_sendfile ? 3 : number == SYS_copy_file_range ? 4 : 2;
  if (number == SYS_writev || number == SYS_pwritev || number == SYS_pwritev2) {
    first = *(const struct iovec*)arguments[1];
    first.iov_len /= 2;
    half[1] = (long)&first;
    half[2] = 1;
  } else {
    half[size] /= 2;
  }
  perform(number, half);
}

// Other threads wait at the lock for their end.
static void count(const Call* call, const long* arguments) {
  pthread_mutex_lock(&lock);
  if (num_counted < kMaxCounted) kinds[num_counted] = call->kind;
  if (++num_counted == at) {
    if (half_of_writes && call->kind == 'w') write_half(call->number, arguments);
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  pthread_mutex_unlock(&lock);
}

static void handle(int signal, siginfo_t* info, void* data) {
  (void)signal;
  int before = errno;
  ucontext_t* context = data;
  long arguments[6];
  for (int i = 0; i < 6; ++i) arguments[i] = (long)REGISTER(context, i);
  const Call* call = kCalls;
  while (call->number != info->si_syscall) ++call;
  int wanted = is_wanted(call, arguments);
  if (wanted) count(call, arguments);
  RESULT(context) = wanted && call->kind == 's' ? 0 : perform(call->number, arguments);
  errno = before;
}

// Lets the calls of `kCalls` raise SIGSYS, but for ours. Returns 0, or -1 with errno.
static int install_filter(void) {
  struct sock_filter filter[8 + kNumCalls + 2];
  uint64_t own = (uint64_t)(uintptr_t)shim_syscall_end;
  uint32_t pointer = offsetof(struct seccomp_data, instruction_pointer);
  unsigned short n = 0;
  struct sock_filter load = BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0);
  struct sock_filter equal = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 0);
  struct sock_filter end = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
#define ADD(what, value, yes, no) \
  (filter[n] = what, filter[n].k = (uint32_t)(value), filter[n].jt = yes, filter[n].jf = no, ++n)
  ADD(load, pointer, 0, 0);
  ADD(equal, own, 0, 3);  // the first word's lower half: both machines are little-endian
  ADD(load, pointer + 4, 0, 0);
  ADD(equal, own >> 32, 0, 1);
  ADD(end, SECCOMP_RET_ALLOW, 0, 0);
  ADD(load, offsetof(struct seccomp_data, arch), 0, 0);
  ADD(equal, ARCHITECTURE, 0, kNumCalls + 1);
  ADD(load, offsetof(struct seccomp_data, nr), 0, 0);
  for (int i = 0; i < kNumCalls; ++i) ADD(equal, kCalls[i].number, kNumCalls - i, 0);
  ADD(end, SECCOMP_RET_ALLOW, 0, 0);
  ADD(end, SECCOMP_RET_TRAP, 0, 0);
  struct sock_fprog program = {n, filter};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
  return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
}

// Counts the calls below `directory`, an absolute path without links, and dies at call `number`; 0:
// at none. Programs that the process starts die of the signal. Returns 0, or errno: no seccomp.
int shim_arm(const char* directory, long number, int half) {
  at = number;
  half_of_writes = half;
  snprintf(prefix, sizeof prefix, "%s", directory);
  prefix_length = strlen(prefix);
  struct sigaction action = {0};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  if (sigaction(SIGSYS, &action, NULL) || install_filter()) return errno;
  return 0;
}
