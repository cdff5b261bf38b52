#include "host/fibre.h"

#include <cstdint>
#include <new>

#include <sys/mman.h>

#if !defined(ASTRAI_UCONTEXT)
// What a call must preserve, by the System V ABI: rbx, rbp, r12 ... r15 and the stack. The floating-point
// control words are left out: kernels do not change them.
asm(R"(
    .text
    .globl astrai_host_switch
    .hidden astrai_host_switch
    .type astrai_host_switch, @function
astrai_host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size astrai_host_switch, . - astrai_host_switch
)");

extern "C" __attribute__((visibility("hidden"))) void astrai_host_switch(void** save, void* resume);
#endif

namespace astrai::host {

#if defined(ASTRAI_UCONTEXT)

void Fibre::start(void* stack_top, size_t stack_bytes, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = static_cast<char*>(stack_top) - stack_bytes;
    context_.uc_stack.ss_size = stack_bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
}

void Fibre::switch_to(Fibre& from, Fibre& to) { swapcontext(&from.context_, &to.context_); }

#else

void Fibre::start(void* stack_top, size_t, void (*entry)()) {
    constexpr int NUM_SAVED = 6;
    void** top = static_cast<void**>(stack_top);
    // Entry finds its stack as after a call: 8 bytes below a multiple of 16, at a return address, null so
    // that debuggers stop there.
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < NUM_SAVED; ++i) {
        *--top = nullptr;
    }
    stack_pointer_ = top;
}

void Fibre::switch_to(Fibre& from, Fibre& to) { astrai_host_switch(&from.stack_pointer_, to.stack_pointer_); }

#endif

namespace {

constexpr size_t PAGE_BYTES = 4096, STACK_BYTES = 128 * 1024, STRIDE_BYTES = STACK_BYTES + PAGE_BYTES;
// Stacks start at different places in their pages, else the same sets of the first-level cache would hold the
// hot end of every one of them.
constexpr size_t NUM_COLOURS = 16, COLOUR_BYTES = PAGE_BYTES / NUM_COLOURS;

}  // namespace

Stacks::~Stacks() {
    if (base_ != nullptr) {
        munmap(base_, count_ * STRIDE_BYTES);
    }
}

void Stacks::reserve(int count) {
    if (count <= count_) {
        return;
    }
    void* memory = mmap(nullptr, count * STRIDE_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        throw std::bad_alloc();
    }
    char* base = static_cast<char*>(memory);
    for (int i = 0; i < count; ++i) {
        if (mprotect(base + i * STRIDE_BYTES, PAGE_BYTES, PROT_NONE) != 0) {
            munmap(base, count * STRIDE_BYTES);
            throw std::bad_alloc();
        }
    }
    if (base_ != nullptr) {
        munmap(base_, count_ * STRIDE_BYTES);
    }
    base_ = base;
    count_ = count;
}

void* Stacks::top(int index) const {
    return base_ + (index + 1) * STRIDE_BYTES - (index % NUM_COLOURS) * COLOUR_BYTES;
}

size_t Stacks::usable_bytes() { return STACK_BYTES - PAGE_BYTES; }

}  // namespace astrai::host
