/* A stand-in for libnvidia-ml.so.1, compiled by the tests.
 *
 * Says what the file named by HOLDFAST_FAKE_NVML says; it is read anew at each count of devices.
 * Lines:  gpus N | driver TEXT | name TEXT | hang FUNCTION | unsupported FUNCTION
 *         gpu I|* KEY NUMBER   (later lines win; keys as used below)
 * Values without a line are those of a healthy, busy 8-GPU node.  With -DOLD_DRIVER the symbols
 * that came after driver 470 are missing, as they are there.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, VERSION_MISMATCH = 25, LINES = 256 };

typedef unsigned long long u64;
typedef void *device;
static struct { int gpu; char key[48]; u64 value; } lines[LINES];
static struct { int hangs; char name[64]; } calls[32];
static int line_count, call_count;
static unsigned gpus;
static char driver[80], product[80];

static int load(void) {
    const char *path = getenv("HOLDFAST_FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char text[256], which[16];
    if (!file) return DRIVER_NOT_LOADED;
    line_count = call_count = 0;
    gpus = 8;
    strcpy(driver, "550.90.07");
    strcpy(product, "NVIDIA H100 80GB HBM3");
    while (fgets(text, sizeof text, file)) {
        char word[64];
        if (sscanf(text, "gpus %u", &gpus) == 1 || sscanf(text, "driver %79s", driver) == 1
            || sscanf(text, "name %79[^\n]", product) == 1)
            continue;
        if (sscanf(text, "hang %63s", word) == 1 || sscanf(text, "unsupported %63s", word) == 1) {
            calls[call_count].hangs = text[0] == 'h';
            strcpy(calls[call_count++].name, word);
        } else if (line_count < LINES
                   && sscanf(text, "gpu %15s %47s %llu", which, lines[line_count].key,
                             &lines[line_count].value) == 3) {
            lines[line_count].gpu = which[0] == '*' ? -1 : atoi(which);
            line_count++;
        }
    }
    fclose(file);
    return OK;
}

static u64 get(device d, const char *key, u64 otherwise) {
    int gpu = (int)(intptr_t)d - 1;
    for (int i = line_count - 1; i >= 0; i--)
        if ((lines[i].gpu == gpu || lines[i].gpu == -1) && !strcmp(lines[i].key, key))
            return lines[i].value;
    return otherwise;
}

/* What each call does first: hang for ever, be unsupported, or find the device gone. */
static int enter(device d, const char *name) {
    for (int i = 0; i < call_count; i++)
        if (!strcmp(calls[i].name, name)) {
            while (calls[i].hangs) pause();
            return NOT_SUPPORTED;
        }
    return d && get(d, "lost", 0) ? GPU_IS_LOST : OK;
}
#define ENTER(d) do { int e_ = enter(d, __func__); if (e_) return e_; } while (0)
#define NUMBER(function, key, otherwise) \
    int function(device d, unsigned *out) { ENTER(d); *out = get(d, key, otherwise); return OK; }

int nvmlInitWithFlags(unsigned flags) { (void)flags; ENTER(NULL); return load(); }
int nvmlInit_v2(void) { ENTER(NULL); return load(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) {
    static char text[32];
    snprintf(text, sizeof text, "error %d", code);
    return code == GPU_IS_LOST ? "GPU is lost" : text;
}
int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    snprintf(out, size, "%s", driver);
    return OK;
}
int nvmlDeviceGetCount_v2(unsigned *out) {
    int failed = load();
    if (failed) return failed;
    ENTER(NULL);
    *out = gpus;
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *out) {
    if (index >= gpus) return INVALID_ARGUMENT;
    *out = (device)(intptr_t)(index + 1);
    ENTER(get(*out, "lost_late", 0) ? NULL : *out);
    return OK;
}
int nvmlDeviceGetName(device d, char *out, unsigned size) {
    (void)d;
    snprintf(out, size, "%s", product);
    return OK;
}
int nvmlDeviceGetUUID(device d, char *out, unsigned size) {
    snprintf(out, size, "GPU-00000000-0000-4000-8000-00000000000%d", (int)(intptr_t)d - 1);
    return OK;
}
int nvmlDeviceGetVbiosVersion(device d, char *out, unsigned size) {
    ENTER(d);
    snprintf(out, size, "96.00.74.00.%02X", (unsigned)get(d, "vbios", 26));
    return OK;
}
struct pci { char legacy[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(device d, struct pci *out) {
    memset(out, 0, sizeof *out);
    out->bus = 0x18 + 0x10 * ((unsigned)(intptr_t)d - 1);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus & 0xffu);
    return OK;
}

int nvmlDeviceGetUtilizationRates(device d, unsigned out[2]) {
    ENTER(d);
    out[0] = get(d, "busy", 98);
    out[1] = get(d, "memory_busy", 41);
    return OK;
}
int nvmlDeviceGetMemoryInfo(device d, u64 out[3]) { /* total, free, used */
    ENTER(d);
    out[0] = get(d, "memory_total", 85520809984ull);
    out[2] = get(d, "memory_used", 64424509440ull);
    out[1] = out[0] - out[2];
    return OK;
}
NUMBER(nvmlDeviceGetPowerUsage, "power_mw", 612000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw", 700000)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_gen", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_gen_max", 5)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max", 16)
NUMBER(nvmlDeviceGetPcieReplayCounter, "pcie_replays", 0)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pending", 0)
int nvmlDeviceGetTotalEnergyConsumption(device d, u64 *out) {
    ENTER(d);
    *out = get(d, "energy_mj", 123456789000ull);
    return OK;
}
int nvmlDeviceGetTemperature(device d, unsigned sensor, unsigned *out) {
    ENTER(d);
    if (sensor) return INVALID_ARGUMENT;
    *out = get(d, "temp", 61);
    return OK;
}
int nvmlDeviceGetTemperatureThreshold(device d, unsigned which, unsigned *out) {
    ENTER(d);
    *out = which ? get(d, "temp_slowdown", 87) : get(d, "temp_shutdown", 92);
    return OK;
}
int nvmlDeviceGetClockInfo(device d, unsigned which, unsigned *out) {
    ENTER(d);
    *out = which == 2 ? get(d, "memory_mhz", 2619) : get(d, "sm_mhz", 1755);
    return OK;
}
int nvmlDeviceGetMaxClockInfo(device d, unsigned which, unsigned *out) {
    ENTER(d);
    *out = which == 2 ? get(d, "memory_mhz_max", 2619) : get(d, "sm_mhz_max", 1980);
    return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(device d, u64 *out) {
    ENTER(d);
    *out = get(d, "throttle", 0x4);
    return OK;
}
int nvmlDeviceGetTotalEccErrors(device d, unsigned type, unsigned period, u64 *out) {
    static const char *keys[2][2] = {{"ecc_corrected", "ecc_corrected_life"},
                                     {"ecc_uncorrected", "ecc_uncorrected_life"}};
    ENTER(d);
    if (type > 1 || period > 1) return INVALID_ARGUMENT;
    *out = get(d, keys[type][period], 0);
    return OK;
}
int nvmlDeviceGetRemappedRows(device d, unsigned *c, unsigned *u, unsigned *pending, unsigned *f) {
    ENTER(d);
    *c = get(d, "remap_corrected", 0);
    *u = get(d, "remap_uncorrected", 0);
    *pending = get(d, "remap_pending", 0);
    *f = get(d, "remap_failed", 0);
    return OK;
}
int nvmlDeviceGetRetiredPages(device d, unsigned cause, unsigned *count, u64 *pages) {
    unsigned have;
    ENTER(d);
    if (get(d, "retired", ~0ull) == ~0ull) return NOT_SUPPORTED; /* row remapping instead */
    have = cause ? get(d, "retired", 0) : 0;
    if (pages && *count < have) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; pages && i < have; i++) pages[i] = 0x1000ull * i;
    *count = have;
    return pages || !have ? OK : INSUFFICIENT_SIZE;
}
int nvmlDeviceGetNvLinkState(device d, unsigned link, unsigned *out) {
    ENTER(d);
    if (link >= get(d, "links", 18)) return INVALID_ARGUMENT;
    *out = link != get(d, "link_down", ~0ull);
    return OK;
}
int nvmlDeviceGetNvLinkErrorCounter(device d, unsigned link, unsigned kind, u64 *out) {
    ENTER(d);
    *out = link == get(d, "link_down", ~0ull) ? get(d, "link_errors", 0) * (kind == 2) : 0;
    return OK;
}

struct process { unsigned pid; u64 memory; unsigned gi, ci; };
static int processes(device d, unsigned *count, struct process *out) {
    unsigned room = *count;
    u64 pid = get(d, "pid", 0);
    *count = pid != 0;
    if (!pid) return OK;
    if (!out || !room) return INSUFFICIENT_SIZE;
    memset(out, 0, sizeof *out);
    out->pid = pid;
    out->memory = get(d, "memory_used", 64424509440ull);
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v2(device d, unsigned *count, struct process *out) {
    ENTER(d);
    return processes(d, count, out);
}

#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(device d, u64 *out) {
    ENTER(d);
    *out = get(d, "throttle", 0x4);
    return OK;
}
struct violation { u64 reference, violated; };
int nvmlDeviceGetViolationStatus(device d, unsigned policy, struct violation *out) {
    ENTER(d);
    out->reference = 0;
    out->violated = policy == 1 ? get(d, "thermal_ns", 0) : 0;
    return OK;
}
int nvmlDeviceGetRowRemapperHistogram(device d, unsigned out[5]) {
    ENTER(d);
    memset(out, 0, 5 * sizeof *out);
    out[0] = get(d, "banks", 640) - get(d, "remap_uncorrected", 0);
    out[1] = get(d, "remap_uncorrected", 0);
    return OK;
}
struct fabric { unsigned version; unsigned char cluster[16]; unsigned status, clique;
                unsigned char state; unsigned mask; };
int nvmlDeviceGetGpuFabricInfoV(device d, struct fabric *out) {
    ENTER(d);
    if (out->version >> 24 != 2) return VERSION_MISMATCH;
    out->state = get(d, "fabric_state", 3);
    out->status = get(d, "fabric_status", 0);
    out->mask = get(d, "fabric_mask", 0x1aa);
    return OK;
}
struct field { unsigned id, scope; long long when, took; unsigned type; int result;
               union { double d; unsigned u; u64 l; } value; };
int nvmlDeviceGetFieldValues(device d, int count, struct field *fields) {
    ENTER(d);
    for (int i = 0; i < count; i++) {
        fields[i].type = 1;
        const u64 none = ~0ull;
        u64 value = fields[i].id == 82 ? get(d, "memory_temp", 74)
                    : fields[i].id == 230 ? get(d, "recovery", 0) : none;
        fields[i].result = value == none ? NOT_SUPPORTED : OK;
        fields[i].value.u = value;
    }
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned *count, struct process *out) {
    ENTER(d);
    return processes(d, count, out);
}
#endif
