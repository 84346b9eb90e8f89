// A libnvidia-ml.so.1 for tests, loaded by the real pynvml. Its switches are told in fake_nvml.py.
// -DOLD_DRIVER leaves out the functions that a driver of 2021 does not have.
#define _GNU_SOURCE
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int Return;
typedef unsigned long long u64;
typedef struct { int gpu, slice; } *Device;
static struct { int gpu, slice; } devices[] = {{0, 0}, {1, 0}, {0, 1}};   // two GPUs, and a MIG slice of the first
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT = 7, VERSION = 25 };

static double number(const char *name, double otherwise) {
    const char *told = getenv(name);
    return told && *told ? atof(told) : otherwise;
}

// value of `key` in a list such as "10=3,*=15@20"; otherwise where it is not there. after: the number behind @
static double listed(const char *name, const char *key, double otherwise, long *after) {
    const char *told = getenv(name);
    size_t length = strlen(key);
    for (; told && *told; told = strchr(told, ',') ? strchr(told, ',') + 1 : "")
        if (!strncmp(told, key, length) && told[length] == '=') {
            char *end;
            double value = strtod(told + length + 1, &end);
            if (after) *after = *end == '@' ? atol(end + 1) : 0;
            return value;
        }
    return otherwise;
}

static double listed_number(const char *name, int key, double otherwise) {
    char text[16];
    snprintf(text, sizeof text, "%d", key);
    return listed(name, text, otherwise, NULL);
}

static _Atomic u64 set_us;                            // 0: real time
static u64 now_ns(void) {
    if (set_us) return set_us * 1000;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

// ---- state that tests advance or reset
static struct { char name[64]; long calls; } seen[64];
static long all_calls;
static atomic_flag busy = ATOMIC_FLAG_INIT;
static double moved;                                  // bytes of fake_traffic
static struct { u64 at; double bytes; } past[1 << 18]; // what had been moved when
static int pasts;

static void lock(void) { while (atomic_flag_test_and_set(&busy)); }
static void unlock(void) { atomic_flag_clear(&busy); }

void fake_clock(u64 us) { set_us = us; }              // 0: the clock runs by itself again
void fake_reset(void) { lock(); memset(seen, 0, sizeof seen); all_calls = 0; moved = 0; pasts = 0; set_us = 0; unlock(); }
void fake_traffic(double bytes) {
    lock();
    moved += bytes;
    if (pasts < 1 << 18) { past[pasts].at = now_ns(); past[pasts++].bytes = moved; }
    unlock();
}
static double moved_by(u64 at) {                      // bytes until then; lock is held
    for (int i = pasts; i-- > 0;) if (past[i].at <= at) return past[i].bytes;
    return 0;
}
long fake_calls(void) { return all_calls; }

// error that FAKE_ERROR has for this function (or for all that ask a device) by now
static Return told(const char *function, int of_device) {
    long mine = 0, after = 0, all;
    lock();
    all = of_device ? ++all_calls : 0;
    for (int i = 0; i < 64; i++) {
        if (!*seen[i].name) strncpy(seen[i].name, function, 63);
        if (!strcmp(seen[i].name, function)) { mine = ++seen[i].calls; break; }
    }
    unlock();
    double code = listed("FAKE_ERROR", function, 0, &after);
    if (code && mine > after) return (Return)code;
    code = of_device ? listed("FAKE_ERROR", "*", 0, &after) : 0;
    return code && all > after ? (Return)code : OK;
}

#define ASK(function) do { Return r = told(function, 1); if (r) return r; } while (0)
#define WHOLE(d) do { if ((d)->slice) return NOT_SUPPORTED; } while (0)

// ---- the library
Return nvmlInitWithFlags(unsigned flags) { return (Return)number("FAKE_INIT", 0); }
Return nvmlInit_v2(void) { return (Return)number("FAKE_INIT", 0); }
Return nvmlShutdown(void) { return told("Shutdown", 0); }
const char *nvmlErrorString(Return r) { return "an error of the fake library"; }
Return nvmlSystemGetDriverVersion(char *text, unsigned n) { snprintf(text, n, "999.99.fake"); return OK; }
Return nvmlSystemGetNVMLVersion(char *text, unsigned n) { snprintf(text, n, "13.999.99.fake"); return OK; }
Return nvmlDeviceGetCount_v2(unsigned *n) { *n = (unsigned)number("FAKE_GPUS", 1); return told("DeviceGetCount", 0); }

// ---- which GPU
static const char *uuids[] = {"GPU-00000000-1111-2222-3333-444444444444", "GPU-00000000-1111-2222-3333-555555555555",
                              "MIG-00000000-1111-2222-3333-444444444444"};
static int exists(int i) { return i == 2 ? number("FAKE_MIG", 0) != 0 : i < (int)number("FAKE_GPUS", 1); }

Return nvmlDeviceGetHandleByIndex_v2(unsigned i, Device *d) {
    if (i > 1 || !exists(i)) return INVALID;
    *d = (Device)&devices[i];
    return told("DeviceGetHandleByIndex", 0);
}
Return nvmlDeviceGetHandleByUUID(const char *uuid, Device *d) {
    Return r = told("DeviceGetHandleByUUID", 0);
    if (r) return r;
    for (int i = 0; i < 3; i++)
        if (exists(i) && !(i == 0 && exists(2)) && !strcmp(uuid, uuids[i])) { *d = (Device)&devices[i]; return OK; }
    return NOT_FOUND;
}
Return nvmlDeviceGetHandleByPciBusId_v2(const char *address, Device *d) {
    Return r = told("DeviceGetHandleByPciBusId", 0);
    unsigned domain, bus;
    if (r) return r;
    if (sscanf(address, "%x:%x:", &domain, &bus) != 2 || bus < 1 || !exists(bus - 1)) return NOT_FOUND;
    *d = (Device)&devices[bus - 1];
    return OK;
}
Return nvmlDeviceGetUUID(Device d, char *text, unsigned n) {
    ASK("DeviceGetUUID"); snprintf(text, n, "%s", uuids[d->slice ? 2 : d->gpu]); return OK;
}
Return nvmlDeviceGetName(Device d, char *text, unsigned n) {
    ASK("DeviceGetName"); snprintf(text, n, "FAKE GPU of kvlab's tests"); return OK;
}
Return nvmlDeviceGetIndex(Device d, unsigned *i) { ASK("DeviceGetIndex"); *i = d->gpu; return OK; }
typedef struct { char old[16]; unsigned domain, bus, device, id, sub; char address[32]; } Pci;
Return nvmlDeviceGetPciInfo_v3(Device d, Pci *p) {
    ASK("DeviceGetPciInfo");
    memset(p, 0, sizeof *p);
    p->bus = d->gpu + 1;
    snprintf(p->address, 32, "00000000:%02x:00.0", p->bus);
    return OK;
}
Return nvmlDeviceGetMigMode(Device d, unsigned *now, unsigned *pending) {
    ASK("DeviceGetMigMode"); *now = *pending = exists(2) && d->gpu == 0; return OK;
}
Return nvmlDeviceIsMigDeviceHandle(Device d, unsigned *is) { ASK("DeviceIsMigDeviceHandle"); *is = d->slice; return OK; }
Return nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device d, Device *whole) {
    ASK("DeviceGetDeviceHandleFromMigDeviceHandle");
    if (!d->slice) return INVALID;
    *whole = (Device)&devices[d->gpu];
    return OK;
}
Return nvmlDeviceGetGpuInstanceId(Device d, unsigned *id) {
    ASK("DeviceGetGpuInstanceId");
    if (!d->slice) return NOT_SUPPORTED;
    *id = 7;
    return OK;
}

// ---- sensors
typedef struct { unsigned gpu, memory; } Utilization;
Return nvmlDeviceGetUtilizationRates(Device d, Utilization *u) {
    ASK("DeviceGetUtilizationRates"); WHOLE(d);
    u->gpu = (unsigned)number("FAKE_UTIL_GPU", 100);
    u->memory = (unsigned)number("FAKE_UTIL_MEMORY", 37);
    return OK;
}
static u64 joules(void) {                             // in mJ, as the counter has them
    u64 spent = (u64)(number("FAKE_POWER_W", 350) * (now_ns() / 1e6));
    const char *how = getenv("FAKE_ENERGY");
    if (how && !strcmp(how, "falls")) return (1ull << 60) - spent;
    return how && !strcmp(how, "still") ? 123456 : spent;
}
Return nvmlDeviceGetTotalEnergyConsumption(Device d, u64 *e) {
    ASK("DeviceGetTotalEnergyConsumption"); WHOLE(d); *e = joules(); return OK;
}
Return nvmlDeviceGetPowerUsage(Device d, unsigned *mw) {
    ASK("DeviceGetPowerUsage"); WHOLE(d); *mw = (unsigned)(1e3 * number("FAKE_POWER_AVERAGE_W", 340)); return OK;
}
Return nvmlDeviceGetEnforcedPowerLimit(Device d, unsigned *mw) {
    ASK("DeviceGetEnforcedPowerLimit"); WHOLE(d); *mw = 700000; return OK;
}
static unsigned megahertz(int type) {
    return (unsigned)(type == 2 ? number("FAKE_MEM_MHZ", 3201) : number("FAKE_SM_MHZ", 1755));
}
Return nvmlDeviceGetClockInfo(Device d, int type, unsigned *mhz) {
    ASK("DeviceGetClockInfo"); *mhz = megahertz(type); return OK;
}
Return nvmlDeviceGetMaxClockInfo(Device d, int type, unsigned *mhz) {
    ASK("DeviceGetMaxClockInfo"); *mhz = type == 2 ? megahertz(2) : 1980; return OK;
}
Return nvmlDeviceGetMemoryBusWidth(Device d, unsigned *bits) {
    ASK("DeviceGetMemoryBusWidth"); *bits = (unsigned)number("FAKE_BUS_BITS", 6144); return OK;
}
Return nvmlDeviceGetTemperature(Device d, int sensor, unsigned *degrees) {
    ASK("DeviceGetTemperature"); *degrees = (unsigned)number("FAKE_TEMPERATURE", 45); return OK;
}
typedef struct { unsigned version; int sensor, degrees; } Temperature;
Return nvmlDeviceGetTemperatureV(Device d, Temperature *t) {
    ASK("DeviceGetTemperature"); t->degrees = (int)number("FAKE_TEMPERATURE", 45); return OK;
}
Return nvmlDeviceGetCurrentClocksEventReasons(Device d, u64 *mask) {
    ASK("DeviceGetCurrentClocksEventReasons"); *mask = (u64)number("FAKE_REASONS", 0); return OK;
}
Return nvmlDeviceGetCurrentClocksThrottleReasons(Device d, u64 *mask) {
    return nvmlDeviceGetCurrentClocksEventReasons(d, mask);
}
typedef struct { u64 total, free, used; } Memory;
Return nvmlDeviceGetMemoryInfo(Device d, Memory *m) {
    ASK("DeviceGetMemoryInfo");
    m->total = 150754820096ull;
    m->used = (u64)number("FAKE_MEMORY_USED", 1 << 30) + (600ull << 20);
    m->free = m->total - m->used;
    return OK;
}
Return nvmlDeviceGetEccMode(Device d, unsigned *now, unsigned *pending) {
    ASK("DeviceGetEccMode"); *now = *pending = (unsigned)number("FAKE_ECC", 1); return OK;
}
Return nvmlDeviceGetTotalEccErrors(Device d, int type, int counter, u64 *n) {
    ASK("DeviceGetTotalEccErrors");
    if (!number("FAKE_ECC", 1)) return NOT_SUPPORTED;
    *n = type == 1 ? (u64)number("FAKE_ECC_ERRORS", 0) : 0;
    return OK;
}
typedef union { double d; unsigned u; u64 ull; long long sll; } Value;
typedef struct { u64 at_us; Value value; } Sample;
Return nvmlDeviceGetSamples(Device d, int type, u64 last_us, int *value_type, unsigned *n, Sample *s) {
    ASK("DeviceGetSamples"); WHOLE(d);
    *value_type = 1;
    if (!s) { *n = 5; return OK; }
    *n = *n < 5 ? *n : 5;
    for (unsigned i = 0; i < *n; i++) {
        s[i].at_us = now_ns() / 1000 - 100000 * (*n - 1 - i);
        s[i].value.u = type == 0 ? (unsigned)(1e3 * number("FAKE_POWER_W", 350))
                     : type == 5 ? megahertz(1) : type == 6 ? megahertz(2)
                     : (unsigned)number(type == 2 ? "FAKE_UTIL_MEMORY" : "FAKE_UTIL_GPU", 100);
    }
    return OK;
}
typedef struct { uint32_t id, scope; int64_t at, latency; int type, status; Value value; } Field;
Return nvmlDeviceGetFieldValues(Device d, int n, Field *f) {
    ASK("DeviceGetFieldValues");
    for (int i = 0; i < n; i++) {
        int id = f[i].id;
        f[i].at = now_ns() / 1000;
        f[i].type = 3;
        f[i].status = (int)listed_number("FAKE_FIELD_STATUS", id, 0);
        if (id == 185 || id == 186) {
            f[i].type = 1;
            f[i].value.u = (unsigned)(1e3 * (id == 186 ? number("FAKE_POWER_W", 350)
                                                       : number("FAKE_POWER_AVERAGE_W", 340)));
        } else if (id == 74 || id == 76 || (id >= 269 && id <= 271))
            f[i].value.ull = (u64)(listed_number("FAKE_THROTTLE", id, 0) * now_ns());
        else if (id == 83)
            f[i].value.ull = joules();
        else if (!f[i].status)
            f[i].status = NOT_SUPPORTED;
    }
    return OK;
}

#ifndef OLD_DRIVER
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
Return nvmlDeviceGetMemoryInfo_v2(Device d, Memory2 *m) {
    ASK("DeviceGetMemoryInfo_v2");
    if (m->version != (2u << 24 | sizeof *m)) return VERSION;
    m->total = 150754820096ull;
    m->reserved = 600ull << 20;
    m->used = (u64)number("FAKE_MEMORY_USED", 1 << 30);
    m->free = m->total - m->used - m->reserved;
    return OK;
}
typedef struct { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; } Process;
Return nvmlDeviceGetComputeRunningProcesses_v3(Device d, unsigned *n, Process *p) {
    if (!p) ASK("DeviceGetComputeRunningProcesses");
    const char *listed = getenv("FAKE_PROCESSES");
    unsigned found = 0, room = p ? *n : 0;
    char text[256];
    snprintf(text, sizeof text, "%s", listed ? listed : "");
    for (char *rest = text, *one; (one = strsep(&rest, ","));) {
        if (!*one) continue;
        if (p && found < room)
            p[found] = (Process){!strcmp(one, "own") ? (unsigned)getpid() : (unsigned)atol(one), 1 << 28, ~0u, ~0u};
        found++;
    }
    *n = found;
    return found > room ? INSUFFICIENT : OK;
}
Return nvmlDeviceGetGraphicsRunningProcesses_v3(Device d, unsigned *n, Process *p) {
    ASK("DeviceGetGraphicsRunningProcesses"); *n = 0; return OK;
}

// ---- GPM: counters between two samples
typedef struct { u64 at; double bytes; } *GpmSample;
typedef struct { unsigned version, supported; } Support;
typedef struct { unsigned id; Return status; double value; struct { char *a, *b, *c; } info; } Metric;
typedef struct { unsigned version, n; GpmSample before, after; Metric metrics[]; } Metrics;

Return nvmlGpmQueryDeviceSupport(Device d, Support *s) {
    ASK("GpmQueryDeviceSupport"); s->supported = number("FAKE_GPM_SAYS", number("FAKE_GPM", 1)) != 0; return OK;
}
Return nvmlGpmSampleAlloc(GpmSample *s) {
    Return r = told("GpmSampleAlloc", 0);
    if (r) return r;
    *s = calloc(1, sizeof **s);
    return OK;
}
Return nvmlGpmSampleFree(GpmSample s) { free(s); return told("GpmSampleFree", 0); }
static Return take(GpmSample s) {
    if (!number("FAKE_GPM", 1)) return NOT_SUPPORTED;
    lock();
    s->at = now_ns();
    s->bytes = moved;
    u64 every = (u64)(1e6 * number("FAKE_REFRESH_MS", 0)), late = (u64)(1e6 * number("FAKE_DELAY_MS", 0));
    if (every) s->at -= s->at % every;
    if (every || late) s->bytes = moved_by(s->at - late);
    unlock();
    return OK;
}
Return nvmlGpmSampleGet(Device d, GpmSample s) {
    ASK("GpmSampleGet");
    return d->slice ? INVALID : take(s);
}
Return nvmlGpmMigSampleGet(Device d, unsigned instance, GpmSample s) {
    ASK("GpmMigSampleGet");
    return d->slice || instance != 7 ? INVALID : take(s);
}
Return nvmlGpmMetricsGet(Metrics *g) {
    ASK("GpmMetricsGet");
    unsigned most = (unsigned)number("FAKE_GPM_MAX", 333);
    if (g->version != 1) return VERSION;
    if (g->n > most || g->after->at <= g->before->at) return INVALID;
    double seconds = (g->after->at - g->before->at) / 1e9;
    double peak = 2e6 * megahertz(2) * number("FAKE_BUS_BITS", 6144) / 8 * number("FAKE_KAPPA", 1);
    double bytes = g->after->bytes - g->before->bytes + number("FAKE_BYTES_PER_SECOND", 0) * seconds;
    for (unsigned i = 0; i < g->n; i++) {
        Metric *m = &g->metrics[i];
        m->status = (Return)listed_number("FAKE_GPM_STATUS", m->id, m->id < most ? OK : INVALID);
        m->info.a = m->info.b = "fake";
        m->info.c = "%";
        switch (m->id) {
        case 2: m->value = number("FAKE_SM_UTIL", 98.5); break;
        case 3: m->value = number("FAKE_SM_OCCUPANCY", 24); break;
        case 5: m->value = number("FAKE_TENSOR_UTIL", 41); break;
        case 10: m->value = number("FAKE_DRAM_UTIL", peak > 0 ? 100 * bytes / (peak * seconds) : NAN); break;
        default: m->value = 0; if (!m->status) m->status = NOT_SUPPORTED;
        }
    }
    return OK;
}
#endif
