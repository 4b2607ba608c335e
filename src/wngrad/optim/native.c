/* The fused step for a CPU: a row's norm, its b and its move while its gradient is in the cache.
 *
 * `wngrad.optim.update` is the reference; tests/test_native.py holds this file to it.
 * `wngrad.optim.native` compiles it where it runs, lays out the tables, and calls `step`.
 *
 * A block of entries that share one b is a row. Rows are dealt out to threads as items of some rows
 * each; a row that is too long for that is cut into pieces, summed first and moved in a second pass.
 * Sums of squares and b's recursion are in float64, everything else in float32, rounded where torch's
 * own operations round (compile with -ffp-contract=off): with a λ that is a number the step is that
 * of the reference bit for bit (tried on x86), for any number of threads and any width of vectors.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* The words of a parameter's record; a layout follows: 4 sizes, then the 6 strides of each tensor. */
enum { P, B, BUF, T, SKIPPED, LENGTH, ROWS, GROUP, HOLD, DENSE, LAYOUT, WORDS = LAYOUT + 22 };
enum { LAM, LAM_KIND, MU, LOG_MU, DECAY_RATE, START, SIGN, SPARE, SETTINGS }; /* of a group */
enum { RECORD, ROW, COUNT, BEGIN, END, ITEM };                         /* of an item */
enum { L_RECORD, L_ROW, L_FIRST, L_PIECES, LONG };                     /* of a row in pieces */
enum { PLAIN, MOMENTUM, ADAM };          /* Algorithms 3, 3 with momentum, and 4 */
enum { NONE, COUPLED, DECOUPLED };       /* weight decay */
#define LANES 32                         /* sums side by side, whatever the machine */
#define FLOOR 0x1p-103                   /* float32's smallest normal number over its epsilon */

typedef struct {
    int rule, decay, skip, latch;
    const float *scale, *found; /* of a GradScaler, or null */
} Method;

typedef struct {
    double lam, mu, log_mu, start;
    float sign, lam_, mu_, rest, decay, shrink;
} Numbers;

typedef struct {
    float *p, *m;
    const float *g;
    int64_t n, dp, dg, dm; /* elements, and the distance between neighbours */
} Run;

static double real(int64_t word) {
    double x;
    memcpy(&x, &word, sizeof x);
    return x;
}

static Numbers numbers(const int64_t *conf, const Method *how) {
    Numbers k;
    k.lam = how->found && *how->found != 0 ? 0.0 : real(conf[LAM]);
    k.mu = real(conf[MU]), k.log_mu = real(conf[LOG_MU]), k.start = real(conf[START]);
    double decay = real(conf[DECAY_RATE]);
    k.sign = (float)real(conf[SIGN]), k.lam_ = (float)k.lam, k.mu_ = (float)k.mu;
    k.rest = (float)(1 - k.mu), k.decay = (float)decay, k.shrink = (float)(1 - k.lam * decay);
    return k;
}

/* The gradient the rule sees: unscaled, of -f if maximizing, with coupled decay in it. */
#define GRADIENT(g, p) \
    (decay == COUPLED ? k->sign * (scale ? (g) / *scale : (g)) + k->decay * (p) \
                      : k->sign * (scale ? (g) / *scale : (g)))

static inline __attribute__((always_inline)) double squares_of(
    Run r, const Numbers *k, const float *scale, int decay, int64_t dp, int64_t dg) {
    double sums[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= r.n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            double g = GRADIENT(r.g[(i + j) * dg], r.p[(i + j) * dp]);
            sums[j] += g * g;
        }
    for (; i < r.n; i++) {
        double g = GRADIENT(r.g[i * dg], r.p[i * dp]);
        sum += g * g;
    }
    for (int j = 0; j < LANES; j++) sum += sums[j];
    return sum;
}

static double squares(Run r, const Numbers *k, const Method *how) {
    if (r.dp != 1 || r.dg != 1 || how->scale)
        return squares_of(r, k, how->scale, how->decay, r.dp, r.dg);
    return how->decay == COUPLED ? squares_of(r, k, 0, COUPLED, 1, 1)
                                 : squares_of(r, k, 0, NONE, 1, 1);
}

static inline __attribute__((always_inline)) void move_of(
    Run r, const Numbers *k, const float *scale, float inv, float b, int rule, int decay,
    int64_t dp, int64_t dg, int64_t dm) {
    float *restrict p = r.p, *restrict m = r.m;
    const float *restrict gs = r.g;
    for (int64_t i = 0; i < r.n; i++) {
        float x = p[i * dp], g = GRADIENT(gs[i * dg], x);
        if (decay == DECOUPLED) x *= k->shrink;
        if (rule == PLAIN) {
            x = fmaf(-k->lam_ * g, inv, x); /* x_j <- x_{j-1} - lam g/b_j */
        } else if (rule == MOMENTUM) {
            m[i * dm] = k->mu_ * m[i * dm] + g / b; /* buf <- mu buf + g/b_j */
            x = fmaf(m[i * dm], -k->lam_, x);       /* x_j <- x_{j-1} - lam buf */
        } else {
            m[i * dm] = fmaf(g, k->rest, k->mu_ * m[i * dm]); /* m_j <- beta m_{j-1} + (1-beta) g */
            x = fmaf(-k->lam_ * m[i * dm], inv, x); /* x_j <- x_{j-1} - lam/b_j m_j/(1-beta^t) */
        }
        p[i * dp] = x;
    }
}

static void move(Run r, const Numbers *k, const Method *how, float inv, float b) {
#define CASE(R, D) \
    if (how->rule == R && how->decay == D) { \
        move_of(r, k, 0, inv, b, R, D, 1, 1, 1); \
        return; \
    }
    if (r.dp == 1 && r.dg == 1 && r.dm == 1 && !how->scale) {
        CASE(PLAIN, NONE) CASE(PLAIN, COUPLED) CASE(PLAIN, DECOUPLED)
        CASE(MOMENTUM, NONE) CASE(MOMENTUM, COUPLED) CASE(MOMENTUM, DECOUPLED)
        CASE(ADAM, NONE) CASE(ADAM, COUPLED) CASE(ADAM, DECOUPLED)
    }
    move_of(r, k, how->scale, inv, b, how->rule, how->decay, r.dp, r.dg, r.dm);
}

/* b_j <- b_{j-1} + lam^2 |g|^2/b_{j-1}; NaN where it would be infinite. */
static float next_b(float b, double sq, const Numbers *k, const Method *how, int hold) {
    double wide = b;
    if (how->latch && wide == 0) { /* b_1 <- C lam |g_1| where a row meets its first gradient */
        double norm = sqrt(sq), first = k->start * k->lam * norm;
        if (norm >= FLOOR && first >= FLOOR) wide = first;
    }
    if (!hold) wide = wide == 0 ? 0 * sq : wide + k->lam * k->lam * sq / wide;
    float new = (float)wide;
    return isinf(new) ? NAN : new;
}

/* Store b, t and the skips of a row; whether it moves, and the factors of its move. */
static int settle(const int64_t *r, int64_t row, double sq, const Numbers *k, const Method *how,
                  float *inv, float *b) {
    float *bs = (float *)r[B] + row;
    float new = next_b(*bs, sq, k, how, r[HOLD] != 0);
    if (how->skip && !(isfinite(new) && isfinite(sq))) {
        ((int32_t *)r[SKIPPED])[row]++;
        return 0;
    }
    *bs = new;
    if (how->latch && new == 0) return 0;
    *b = new == 0 ? 1 : new;
    *inv = 1 / *b;
    if (how->rule == ADAM) {
        float t = ((float *)r[T])[row] += 1;
        *inv = (float)(1 / (1 - exp2((t < 1 ? 1 : t) * k->log_mu))) / *b;
    }
    return 1;
}

/* What is done to each run of a row's elements from `begin` to `end`: its squares are summed or, if
 * `inv` is given, it moves. */
static double each_run(const int64_t *r, const float *g, int64_t row, int64_t begin, int64_t end,
                       const Numbers *k, const Method *how, const float *inv, float b) {
    float *p = (float *)r[P], *m = (float *)(r[BUF] ? r[BUF] : r[P]);
    double sum = 0;
    if (r[DENSE]) {
        int64_t at = row * r[LENGTH] + begin;
        Run run = {p + at, m + at, g + at, end - begin, 1, 1, 1};
        if (!inv) return squares(run, k, how);
        move(run, k, how, *inv, b);
        return 0;
    }
    const int64_t *size = r + LAYOUT, *sp = size + 4, *sg = sp + 6, *sm = sg + 6;
    int64_t inner = size[3], i = row / size[0], j = row % size[0];
    for (int64_t e = begin; e < end;) {
        int64_t c = e / inner % size[2], d = e / (inner * size[2]) % size[1];
        int64_t f = e / (inner * size[2] * size[1]), at = e % inner;
        int64_t n = inner - at < end - e ? inner - at : end - e;
#define SPOT(s) (i * s[0] + j * s[1] + f * s[2] + d * s[3] + c * s[4] + at * s[5])
        Run run = {p + SPOT(sp), m + SPOT(sm), g + SPOT(sg), n, sp[5], sg[5], sm[5]};
        if (!inv)
            sum += squares(run, k, how);
        else
            move(run, k, how, *inv, b);
        e += n;
    }
    return sum;
}

/* One step of `params` parameters.
 *
 * Items from 0 to `whole` are rows; those from `whole` to `items` are pieces of `longs` long rows,
 * with room for a sum each in `sums`, and for two factors of each long row in `factors`.
 */
void step(const int64_t *records, int64_t params, const int64_t *grads, const int64_t *conf,
          const int64_t *work, int64_t whole, int64_t items, const int64_t *rows, int64_t longs,
          double *sums, float *factors, int rule, int decay, int skip, int latch,
          const float *scale, const float *found, int threads) {
    Method how = {rule, decay, skip, latch, scale, found};
    for (int64_t i = 0; i < params && rule != ADAM; i++) {
        const int64_t *r = records + i * WORDS;
        *(float *)r[T] += numbers(conf + r[GROUP] * SETTINGS, &how).lam != 0;
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < items; i++) {
        const int64_t *item = work + i * ITEM, *r = records + item[RECORD] * WORDS;
        const float *g = (const float *)grads[item[RECORD]];
        Numbers k = numbers(conf + r[GROUP] * SETTINGS, &how);
        if (k.lam == 0) continue; /* a step without rate changes nothing */
        if (i >= whole) {
            sums[i - whole] = each_run(r, g, item[ROW], item[BEGIN], item[END], &k, &how, 0, 0);
            continue;
        }
        for (int64_t row = item[ROW]; row < item[ROW] + item[COUNT]; row++) {
            float inv, b;
            double sq = each_run(r, g, row, 0, r[LENGTH], &k, &how, 0, 0);
            if (settle(r, row, sq, &k, &how, &inv, &b))
                each_run(r, g, row, 0, r[LENGTH], &k, &how, &inv, b);
        }
    }
    if (!longs) return;
    for (int64_t i = 0; i < longs; i++) {
        const int64_t *l = rows + i * LONG, *r = records + l[L_RECORD] * WORDS;
        Numbers k = numbers(conf + r[GROUP] * SETTINGS, &how);
        double sq = 0;
        for (int64_t j = 0; j < l[L_PIECES]; j++) sq += sums[l[L_FIRST] + j];
        float *f = factors + 2 * i;
        if (k.lam == 0 || !settle(r, l[L_ROW], sq, &k, &how, f, f + 1)) f[1] = 0; /* it stays */
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = whole; i < items; i++) {
        const int64_t *item = work + i * ITEM, *r = records + item[RECORD] * WORDS;
        const float *f = factors + 2 * item[COUNT], *g = (const float *)grads[item[RECORD]];
        Numbers k = numbers(conf + r[GROUP] * SETTINGS, &how);
        if (f[1] != 0) each_run(r, g, item[ROW], item[BEGIN], item[END], &k, &how, f, f[1]);
    }
}
