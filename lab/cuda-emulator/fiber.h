// Fibers of the software CUDA device: a stack and a place to resume from.
//
// On x86-64 a switch saves the six registers that a function must keep, and the stack pointer. The
// rest of the world, or CXX="g++ -DEMU_UCONTEXT", takes ucontext, slower by two system calls.
//
// Not here: floating-point modes and signal masks, which no kernel changes.
#pragma once
#include <cstddef>
#include <cstring>
#if !defined(__x86_64__) || defined(EMU_UCONTEXT)
#include <ucontext.h>
#endif

const size_t STACK_BYTES = 128 << 10;

#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
extern "C" void emu_switch(void **save, void *load);
asm(".text\n"
    ".hidden emu_switch\n"
    ".globl emu_switch\n"
    ".type emu_switch,@function\n"
    "emu_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".size emu_switch,.-emu_switch\n");

struct Context {
    void *sp;
    // Six registers to restore, the address to return to, and the frame of a caller that is not.
    void begin(char *stack, void (*body)()) {
        void **top = (void **)(stack + STACK_BYTES);
        top[-1] = nullptr;
        top[-2] = (void *)body;
        memset(top - 8, 0, 6 * sizeof(void *));
        sp = top - 8;
    }
};
static inline void switch_to(Context &from, Context &to) { emu_switch(&from.sp, to.sp); }
#else
struct Context {
    ucontext_t state;
    void begin(char *stack, void (*body)()) {
        getcontext(&state);
        state.uc_stack = {stack, 0, STACK_BYTES};
        state.uc_link = nullptr;
        makecontext(&state, body, 0);
    }
};
static inline void switch_to(Context &from, Context &to) { swapcontext(&from.state, &to.state); }
#endif
