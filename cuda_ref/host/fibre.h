// Threads of a block as fibres: stacks of their own on one CPU thread, switched by hand.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) && !defined(ASTRAI_UCONTEXT)
#define ASTRAI_UCONTEXT
#endif

#if defined(ASTRAI_UCONTEXT)
#include <ucontext.h>
#endif

namespace astrai::host {

// A point of execution. A fibre is resumed on the CPU thread that started it.
class Fibre {
public:
    // Makes the next switch to this fibre call entry, which must not return, on a stack that ends at
    // stack_top.
    void start(void* stack_top, size_t stack_bytes, void (*entry)());

    // Saves the running fibre in from and goes on where to was saved.
    static void switch_to(Fibre& from, Fibre& to);

private:
#if defined(ASTRAI_UCONTEXT)
    ucontext_t context_;
#else
    void* stack_pointer_ = nullptr;
#endif
};

// Stacks of the threads of one block. Below each lies a page that may not be touched.
class Stacks {
public:
    Stacks() = default;
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    ~Stacks();

    // Room for count stacks; keeps those there are. Raises std::bad_alloc.
    void reserve(int count);

    // End of stack index; usable_bytes() lie below it.
    void* top(int index) const;
    static size_t usable_bytes();

private:
    char* base_ = nullptr;
    int count_ = 0;
};

}  // namespace astrai::host
