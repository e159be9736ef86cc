// libnvrtc of the software CUDA device: a program is compiled by g++ into a shared library.
//
//     source -> g++ -E -> words of CUDA rewritten (rewrite.cpp) -> g++ -c -> library
//
// The "PTX" and the "CUBIN" are a few lines of text that name the library. Libraries stay in a
// folder of temporary files under the hash of everything they depend on.
//
// Environment: ELAPID_EMULATOR_CACHE (folder), ELAPID_EMULATOR_CXX (compiler), ELAPID_EMULATOR_SM,
// ELAPID_EMULATOR_CHECKS=0 (no test of alignment and of indices into arrays, faster),
// ELAPID_EMULATOR_KEEP=1 (leaves the files of each compilation).
//
// Not here: PTX, LTO, time traces, precompiled headers, the math of --use_fast_math, multiply-adds
// that the compiler fuses.
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "rewrite.h"

#define API extern "C" __attribute__((visibility("default")))

extern char **environ;

namespace {

using std::string;
using std::vector;

enum Status {
    SUCCESS = 0,
    PROGRAM_CREATION_FAILURE = 2,
    INVALID_INPUT = 3,
    INVALID_PROGRAM = 4,
    INVALID_OPTION = 5,
    COMPILATION = 6,
    NO_NAME_EXPRESSIONS_AFTER_COMPILATION = 8,
    NO_LOWERED_NAMES_BEFORE_COMPILATION = 9,
    NAME_EXPRESSION_NOT_VALID = 10,
    INTERNAL_ERROR = 11,
};

struct Header {
    string name, text;
};

struct Program {
    string name, source;
    vector<Header> headers;
    vector<string> name_expressions, lowered_names;
    string log, image;
    bool compiled = false, real_arch = false;
};

// ---- Compiling ----------------------------------------------------------------------------------

string env(const char *name, const char *otherwise) {
    const char *text = getenv(name);
    return text && *text ? text : otherwise;
}

string read_file(const string &path) {
    std::ifstream in(path, std::ios::binary);
    std::stringstream s;
    s << in.rdbuf();
    return s.str();
}

bool write_file(const string &path, const string &text) {
    std::ofstream out(path, std::ios::binary);
    out << text;
    return out.good();
}

// Where this library lies, and cuda_device.h and libcuda.so.1 beside it.
string home() {
    Dl_info info;
    if (!dladdr((void *)home, &info)) return ".";
    char *whole = realpath(info.dli_fname, nullptr);
    string path = whole ? whole : info.dli_fname;
    free(whole);
    return path.substr(0, path.rfind('/'));
}

// One folder per user, which nobody else can write to.
string cache_folder() {
    string folder = env("ELAPID_EMULATOR_CACHE", "");
    if (folder.empty())
        folder = env("TMPDIR", "/tmp") + "/elapid-cuda-emulator-" + std::to_string(getuid());
    mkdir(folder.c_str(), 0700);
    struct stat s;
    if (stat(folder.c_str(), &s) || s.st_uid != getuid()) return "";
    return folder;
}

string hash_of(const string &s) {
    uint64_t a = 0xCBF29CE484222325, b = 0x9E3779B97F4A7C15;
    for (unsigned char c : s) {
        a = (a ^ c) * 0x100000001B3;
        b = (b + c) * 0xD6E8FEB86659FD93;
        b ^= b >> 32;
    }
    char text[40];
    snprintf(text, sizeof text, "%016llx%016llx", (unsigned long long)a, (unsigned long long)b);
    return text;
}

// Runs a command with its output in a file; true where it ends well.
bool run(const vector<string> &command, const string &log) {
    vector<char *> argv;
    for (const string &word : command) argv.push_back((char *)word.c_str());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&files, 1, 2);
    pid_t child;
    int failed = posix_spawnp(&child, argv[0], &files, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    if (failed) {
        write_file(log, "cannot run " + command[0] + ": " + strerror(failed) + "\n");
        return false;
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

struct Options {
    vector<string> compiler; // for g++
    string standard = "-std=c++17";
    int arch = 0;
    bool real_arch = false;
    string unknown;
};

bool starts(const string &s, const char *with) { return s.rfind(with, 0) == 0; }

// Options that change nothing here. Each may have a value behind `=`.
bool harmless(const string &name) {
    static const char *names[] = {
        "use_fast_math", "fmad", "ftz", "prec-div", "prec-sqrt", "maxrregcount", "restrict",
        "device-debug", "G", "generate-line-info", "lineinfo", "extra-device-vectorization",
        "dopt", "Ofast-compile", "ptxas-options", "Xptxas", "minimal",
        "device-as-default-execution-space", "default-device", "relocatable-device-code", "rdc",
        "device-c", "dc", "device-w", "dw", "disable-warnings", "w", "diag-error", "diag-suppress",
        "diag-warn", "diag-warn", "brief-diagnostics", "builtin-initializer-list",
        "builtin-move-forward", "display-error-number", "no-display-error-number", "split-compile",
        "no-source-include", "no-cache", "jump-table-density", "device-stack-protector", "pch"};
    for (const char *n : names)
        if (name == n) return true;
    return false;
}

void take_option(Options &o, const vector<string> &words, size_t &i) {
    const string &w = words[i];
    size_t dashes = w.find_first_not_of('-');
    string bare = dashes == string::npos ? "" : w.substr(dashes);
    size_t equals = bare.find('=');
    string name = bare.substr(0, equals);
    string value = equals == string::npos ? "" : bare.substr(equals + 1);
    auto next = [&] { return value.empty() && i + 1 < words.size() ? words[++i] : value; };
    if (name == "define-macro") {
        o.compiler.push_back("-D" + next());
    } else if (name == "undefine-macro") {
        o.compiler.push_back("-U" + next());
    } else if (name == "include-path") {
        o.compiler.push_back("-I" + next());
    } else if (name == "pre-include" || name == "include") {
        o.compiler.insert(o.compiler.end(), {"-include", next()});
    } else if (name == "gpu-architecture" || name == "arch") {
        string arch = next();
        size_t digit = arch.find_first_of("0123456789");
        if (digit != string::npos) o.arch = atoi(arch.c_str() + digit);
        o.real_arch = starts(arch, "sm_");
    } else if (name == "std") {
        o.standard = "-std=" + next();
    } else if (dashes == 1 && strchr("DUI", bare[0])) {
        o.compiler.push_back(w);
        if (bare.size() == 1 && i + 1 < words.size()) o.compiler.back() += words[++i];
    } else if (!harmless(name)) {
        o.unknown = w;
    }
}

vector<string> base_flags(const Options &o, const string &folder) {
    int arch = o.arch ? o.arch : atoi(env("ELAPID_EMULATOR_SM", "89").c_str());
    vector<string> flags = {o.standard, "-w", "-I" + folder, "-I" + home(), "-DELAPID_EMULATED=1",
                            "-D__CUDACC__=1", "-D__CUDACC_RTC__=1", "-D__NVCC__=1",
                            "-D__CUDACC_VER_MAJOR__=13", "-D__CUDACC_VER_MINOR__=0",
                            "-D__CUDA_ARCH__=" + std::to_string(arch * 10)};
    flags.insert(flags.end(), o.compiler.begin(), o.compiler.end());
    return flags;
}

// No unique symbols: shared memory of inline functions would be one for all libraries, whatever
// size each of them gives it.
vector<string> code_flags(const Options &o) {
    vector<string> flags = {o.standard, "-w", "-O2", "-fPIC", "-ffp-contract=off", "-fwrapv",
                            "-fno-strict-aliasing", "-fno-semantic-interposition",
                            "-fno-gnu-unique", "-fno-exceptions", "-fno-rtti", "-fno-math-errno"};
#if defined(__x86_64__)
    flags.push_back("-march=native");
#endif
    if (env("ELAPID_EMULATOR_CHECKS", "1") != "0") flags.push_back("-fsanitize=alignment,bounds");
    return flags;
}

vector<string> command(std::initializer_list<vector<string>> parts) {
    vector<string> all = {env("ELAPID_EMULATOR_CXX", "g++")};
    for (const auto &p : parts) all.insert(all.end(), p.begin(), p.end());
    return all;
}

string text_of(const string &library) {
    return "// A program of the Elapid CUDA emulator, not PTX.\n.emulated " + library + "\n";
}

string cache_key(const Program &p, const Options &o) {
    string all = p.name + '\0' + p.source + '\0' + read_file(home() + "/cuda_device.h") +
                 read_file(home() + "/runtime.h") + read_file(home() + "/libnvrtc.so.13") +
                 env("ELAPID_EMULATOR_CXX", "g++");
    for (const Header &h : p.headers) all += '\0' + h.name + '\0' + h.text;
    for (const string &e : p.name_expressions) all += '\0' + e;
    for (const string &f : base_flags(o, "")) all += '\0' + f;
    for (const string &f : code_flags(o)) all += '\0' + f;
    return hash_of(all);
}

// Makes `library` in `work`, a folder of its own; the output of g++ ends in `log`.
bool build(const Program &p, const Options &o, const string &work, const string &library) {
    string log = work + "/log";
    write_file(work + "/program.cu", "#include \"cuda_device.h\"\n# 1 \"" + p.name + "\"\n" +
                                         p.source + "\n");
    for (const Header &h : p.headers) {
        for (size_t at = 0; (at = h.name.find('/', at + 1)) != string::npos;)
            mkdir((work + "/" + h.name.substr(0, at)).c_str(), 0700);
        write_file(work + "/" + h.name, h.text);
    }
    if (!run(command({base_flags(o, work), {"-E", "-x", "c++", work + "/program.cu", "-o",
                                            work + "/program.i"}}), log))
        return false;
    write_file(work + "/program.ii", rewritten(read_file(work + "/program.i"), p.name_expressions));
    string object = work + "/program.o";
    if (!run(command({code_flags(o), {"-c", work + "/program.ii", "-o", object}}), log))
        return false;
    string made = work + "/program.so";
    if (!run(command({{"-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", object, "-o", made,
                       "-L" + home(), "-l:libcuda.so.1", "-lm"}}), log))
        return false;
    return rename(made.c_str(), library.c_str()) == 0;
}

bool good_cubin(const Program *p) { return p && p->compiled && p->real_arch; }

} // namespace

// ---- The interface ------------------------------------------------------------------------------

API int nvrtcVersion(int *major, int *minor) {
    if (!major || !minor) return INVALID_INPUT;
    *major = 13;
    *minor = 0;
    return SUCCESS;
}

static const int ARCHS[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

API int nvrtcGetNumSupportedArchs(int *n) {
    *n = sizeof ARCHS / sizeof *ARCHS;
    return SUCCESS;
}

API int nvrtcGetSupportedArchs(int *archs) {
    memcpy(archs, ARCHS, sizeof ARCHS);
    return SUCCESS;
}

API const char *nvrtcGetErrorString(int status) {
    switch (status) {
    case SUCCESS: return "NVRTC_SUCCESS";
    case PROGRAM_CREATION_FAILURE: return "NVRTC_ERROR_PROGRAM_CREATION_FAILURE";
    case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
    case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
    case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
    case COMPILATION: return "NVRTC_ERROR_COMPILATION";
    case NO_NAME_EXPRESSIONS_AFTER_COMPILATION:
        return "NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION";
    case NO_LOWERED_NAMES_BEFORE_COMPILATION:
        return "NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION";
    case NAME_EXPRESSION_NOT_VALID: return "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID";
    default: return "NVRTC_ERROR_INTERNAL_ERROR";
    }
}

API int nvrtcCreateProgram(Program **out, const char *source, const char *name, int n_headers,
                           const char *const *headers, const char *const *names) {
    if (!out || !source) return INVALID_INPUT;
    Program *p = new Program;
    p->source = source;
    p->name = name && *name ? name : "default_program";
    for (int i = 0; i < n_headers; i++) p->headers.push_back({names[i], headers[i]});
    *out = p;
    return SUCCESS;
}

API int nvrtcDestroyProgram(Program **p) {
    if (!p || !*p) return INVALID_PROGRAM;
    delete *p;
    *p = nullptr;
    return SUCCESS;
}

API int nvrtcAddNameExpression(Program *p, const char *expression) {
    if (!p || !expression || !*expression) return INVALID_INPUT;
    if (p->compiled) return NO_NAME_EXPRESSIONS_AFTER_COMPILATION;
    p->name_expressions.push_back(expression);
    return SUCCESS;
}

API int nvrtcGetLoweredName(Program *p, const char *expression, const char **name) {
    if (!p || !expression || !name) return INVALID_INPUT;
    if (!p->compiled) return NO_LOWERED_NAMES_BEFORE_COMPILATION;
    for (size_t i = 0; i < p->name_expressions.size(); i++)
        if (p->name_expressions[i] == expression) {
            *name = p->lowered_names[i].c_str();
            return SUCCESS;
        }
    return NAME_EXPRESSION_NOT_VALID;
}

API int nvrtcCompileProgram(Program *p, int n_options, const char *const *options) {
    if (!p) return INVALID_PROGRAM;
    Options o;
    vector<string> words(options, options + n_options);
    for (size_t i = 0; i < words.size(); i++) take_option(o, words, i);
    if (!o.unknown.empty()) {
        p->log = "nvrtc: error: invalid value for option or unknown option " + o.unknown + "\n";
        return INVALID_OPTION;
    }
    string folder = cache_folder();
    if (folder.empty()) {
        p->log = "no folder of this user for compiled programs: set ELAPID_EMULATOR_CACHE\n";
        return INTERNAL_ERROR;
    }
    string library = folder + "/" + cache_key(*p, o) + ".so";
    p->log.clear();
    if (access(library.c_str(), R_OK)) {
        string work = folder + "/work-XXXXXX";
        if (!mkdtemp(&work[0])) return INTERNAL_ERROR;
        bool built = build(*p, o, work, library);
        p->log = read_file(work + "/log");
        if (env("ELAPID_EMULATOR_KEEP", "").empty())
            run({"rm", "-rf", work}, "/dev/null");
        else
            fprintf(stderr, "cuda emulator: %s is kept in %s\n", p->name.c_str(), work.c_str());
        if (!built) return COMPILATION;
    }
    p->image = text_of(library);
    for (size_t i = 0; i < p->name_expressions.size(); i++)
        p->lowered_names.push_back(lowered_name(i));
    p->compiled = true;
    p->real_arch = o.real_arch;
    return SUCCESS;
}

API int nvrtcGetPTXSize(Program *p, size_t *bytes) {
    if (!p || !p->compiled) return INVALID_PROGRAM;
    *bytes = p->image.size() + 1;
    return SUCCESS;
}

API int nvrtcGetPTX(Program *p, char *text) {
    if (!p || !p->compiled) return INVALID_PROGRAM;
    memcpy(text, p->image.c_str(), p->image.size() + 1);
    return SUCCESS;
}

// As with NVRTC, there is a CUBIN only for a real architecture (sm_89, not compute_89).
API int nvrtcGetCUBINSize(Program *p, size_t *bytes) {
    if (!p || !p->compiled) return INVALID_PROGRAM;
    *bytes = good_cubin(p) ? p->image.size() + 1 : 0;
    return SUCCESS;
}

API int nvrtcGetCUBIN(Program *p, char *text) {
    if (!good_cubin(p)) return INVALID_PROGRAM;
    return nvrtcGetPTX(p, text);
}

API int nvrtcGetProgramLogSize(Program *p, size_t *bytes) {
    if (!p) return INVALID_PROGRAM;
    *bytes = p->log.size() + 1;
    return SUCCESS;
}

API int nvrtcGetProgramLog(Program *p, char *text) {
    if (!p) return INVALID_PROGRAM;
    memcpy(text, p->log.c_str(), p->log.size() + 1);
    return SUCCESS;
}
