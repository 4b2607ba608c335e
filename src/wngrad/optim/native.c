/* The fused step for a CPU: a row's norm, its b and its move while its gradient is in the cache.
 *
 * `wngrad.optim.update` is the reference; tests/test_native.py holds this file to it.
 * `wngrad.optim.native` compiles it where it runs, lays out the tables, and calls `step`.
 *
 * A block of entries that share one b is a row; the parameters of a family share theirs row by row.
 * Rows are dealt out to threads as items of some rows each; a row that is too long for that is cut
 * into pieces, summed first and moved in a second pass.
 * Parameters, gradients and buffers are in float32 or bfloat16, b and t in float32. Sums of squares
 * and b's recursion are in float64, everything else in float32, rounded where torch's own operations
 * round (compile with -ffp-contract=off): with a λ that is a number the step is that of the reference
 * bit for bit (tried on x86), for any number of threads and any width of vectors.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* The words of a parameter's record; a layout follows: 4 sizes, then the 6 strides of each tensor. */
enum { P, B, BUF, T, SKIPPED, LENGTH, GROUP, HOLD, DENSE, LAYOUT, WORDS = LAYOUT + 22 };
enum { LAM, LAM_KIND, MU, LOG_MU, DECAY_RATE, START, SIGN, SPARE, SETTINGS }; /* of a group */
enum { FIRST, MEMBERS, ABSENT, ABSENTS, FAMILY }; /* its records, and the b of those not here */
enum { OF, ROW, COUNT, SLOT, ITEM };              /* rows of a family */
enum { RECORD, P_ROW, FACTOR, BEGIN, END, PIECE };       /* a piece of a record's row */
enum { L_OF, L_ROW, L_FACTOR, L_PIECES, L_FIRST, LONG }; /* a family's row in pieces */
enum { ALL, LOOK, REST }; /* a step; or its sums, to be looked at, and then what is left of it */
enum { PLAIN, MOMENTUM, ADAM };    /* Algorithms 3, 3 with momentum, and 4 */
enum { NONE, COUPLED, DECOUPLED }; /* weight decay */
#define LANES 32                   /* sums side by side, whatever the machine */
#define FLOOR 0x1p-103             /* float32's smallest normal number over its epsilon */

/* What steps, and how; native.py has it field for field. */
typedef struct {
    const int64_t *records, *families, *absent, *rows, *pieces, *longs;
    int64_t how_many, whole, cut, long_rows; /* of families, rows, pieces, longs */
    double *sums;   /* of pieces; then of whole rows, where they are looked at */
    float *factors; /* two for each record of each long row */
    int32_t *bad;   /* rows of each family that are not finite */
    const int64_t *conf, *grads;
    int64_t rule, decay, skip, latch, half; /* half: in bfloat16 instead of float32 */
    const float *scale, *found; /* of a GradScaler, or null */
} Step;

typedef struct {
    double lam, mu, log_mu, start;
    float sign, lam_, mu_, rest, decay, shrink;
} Numbers;

typedef struct {
    char *p, *m;
    const char *g;
    int64_t n, dp, dg, dm; /* elements, and the distance between neighbours */
} Run;

#define INLINE static inline __attribute__((always_inline))

INLINE float get(const char *at, int64_t i, int half) {
    if (!half) return ((const float *)at)[i];
    uint32_t word = (uint32_t)((const uint16_t *)at)[i] << 16;
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

/* To the nearest bfloat16, to an even one if there are two. */
INLINE void put(char *at, int64_t i, float x, int half) {
    if (!half) {
        ((float *)at)[i] = x;
        return;
    }
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    word += 0x7FFF + (word >> 16 & 1);
    ((uint16_t *)at)[i] = x != x ? 0x7FC0 : word >> 16;
}

static double real(int64_t word) {
    double x;
    memcpy(&x, &word, sizeof x);
    return x;
}

static Numbers numbers(const int64_t *r, const Step *s) {
    const int64_t *conf = s->conf + r[GROUP] * SETTINGS;
    Numbers k;
    k.lam = s->found && *s->found != 0 ? 0.0 : real(conf[LAM]);
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

INLINE double squares_of(Run r, const Numbers *k, const float *scale, int decay, int64_t dp,
                         int64_t dg, int half) {
    double sums[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= r.n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            double g = GRADIENT(get(r.g, (i + j) * dg, half), get(r.p, (i + j) * dp, half));
            sums[j] = fma(g, g, sums[j]);
        }
    for (; i < r.n; i++) {
        double g = GRADIENT(get(r.g, i * dg, half), get(r.p, i * dp, half));
        sum += g * g;
    }
#define FOLD(n) for (int j = 0; j < n; j++) sums[j] += sums[j + n];
    FOLD(16) FOLD(8) FOLD(4) FOLD(2)
    return sum + (sums[0] + sums[1]);
}

static double squares(Run r, const Numbers *k, const Step *s) {
    if (r.dp != 1 || r.dg != 1 || s->scale)
        return squares_of(r, k, s->scale, s->decay, r.dp, r.dg, s->half);
#define CASE(D, H) \
    if ((s->decay == COUPLED) == (D == COUPLED) && s->half == H) \
        return squares_of(r, k, 0, D, 1, 1, H);
    CASE(COUPLED, 0) CASE(COUPLED, 1) CASE(NONE, 0)
#undef CASE
    return squares_of(r, k, 0, NONE, 1, 1, 1);
}

/* In float32 as torch moves in place, in bfloat16 as it does with temporaries. */
INLINE void move_of(Run r, const Numbers *k, const float *scale, float inv, float b, int rule,
                    int decay, int64_t dp, int64_t dg, int64_t dm, int half) {
    char *restrict p = r.p, *restrict m = r.m;
    const char *restrict gs = r.g;
    for (int64_t i = 0; i < r.n; i++) {
        float x = get(p, i * dp, half), g = GRADIENT(get(gs, i * dg, half), x), mean;
        if (decay == DECOUPLED) x *= k->shrink;
        if (rule == PLAIN) { /* x_j <- x_{j-1} - lam g/b_j */
            x = half ? x - k->lam_ * (g / b) : fmaf(-k->lam_ * g, inv, x);
        } else if (rule == MOMENTUM) { /* buf <- mu buf + g/b_j, x_j <- x_{j-1} - lam buf */
            mean = k->mu_ * get(m, i * dm, half) + g / b;
            x = half ? x - k->lam_ * mean : fmaf(mean, -k->lam_, x);
            put(m, i * dm, mean, half);
        } else { /* m_j <- beta m_{j-1} + (1-beta) g, x_j <- x_{j-1} - lam/b_j m_j/(1-beta^t) */
            mean = k->mu_ * get(m, i * dm, half);
            mean = half ? mean + k->rest * g : fmaf(g, k->rest, mean);
            x = half ? x - k->lam_ * (mean * inv / b) : fmaf(-k->lam_ * mean, inv, x);
            put(m, i * dm, mean, half);
        }
        put(p, i * dp, x, half);
    }
}

static void move(Run r, const Numbers *k, const Step *s, float inv, float b) {
#define CASE(R, D, H) \
    if (s->rule == R && s->decay == D && s->half == H) { \
        move_of(r, k, 0, inv, b, R, D, 1, 1, 1, H); \
        return; \
    }
#define CASES(R) \
    CASE(R, NONE, 0) CASE(R, COUPLED, 0) CASE(R, DECOUPLED, 0) \
    CASE(R, NONE, 1) CASE(R, COUPLED, 1) CASE(R, DECOUPLED, 1)
    if (r.dp == 1 && r.dg == 1 && r.dm == 1 && !s->scale) {
        CASES(PLAIN) CASES(MOMENTUM) CASES(ADAM)
    }
    move_of(r, k, s->scale, inv, b, s->rule, s->decay, r.dp, r.dg, r.dm, s->half);
}

/* b_j <- b_{j-1} + lam^2 |g|^2/b_{j-1}; NaN where it would be infinite. */
static float next_b(float b, double sq, const Numbers *k, const Step *s, int hold) {
    double wide = b;
    if (s->latch && wide == 0) { /* b_1 <- C lam |g_1| where a row meets its first gradient */
        double norm = sqrt(sq), first = k->start * k->lam * norm;
        if (norm >= FLOOR && first >= FLOOR) wide = first;
    }
    if (!hold) wide = wide == 0 ? 0 * sq : wide + k->lam * k->lam * sq / wide;
    float new = (float)wide;
    return isinf(new) ? NAN : new;
}

/* The b that a family's row starts from: b never decreases, so the largest is the latest. */
static float shared_b(const int64_t *f, int64_t row, const Step *s) {
    const int64_t *first = s->records + f[FIRST] * WORDS, *absent = s->absent + f[ABSENT];
    float b = ((const float *)first[B])[row];
    for (int64_t i = 1; i < f[MEMBERS] + f[ABSENTS]; i++) {
        int64_t there = i < f[MEMBERS] ? first[i * WORDS + B] : absent[i - f[MEMBERS]];
        float x = ((const float *)there)[row];
        if (x > b || isnan(x)) b = x;
    }
    return b;
}

/* Store a record's b, t and skips of a row; whether it moves, and the factors of its move. */
static int settle(const int64_t *r, int64_t row, float new, int finite, const Numbers *k,
                  const Step *s, float *inv, float *b) {
    if (s->skip && !finite) {
        ((int32_t *)r[SKIPPED])[row]++;
        return 0;
    }
    ((float *)r[B])[row] = new;
    if (s->latch && new == 0) return 0;
    *b = new == 0 ? 1 : new;
    *inv = 1 / *b;
    if (s->rule == ADAM) {
        float t = ((float *)r[T])[row] += 1;
        *inv = (float)(1 / (1 - exp2((t < 1 ? 1 : t) * k->log_mu)));
        if (!s->half) *inv /= *b;
    }
    return 1;
}

/* What is done to each run of a row's elements from `begin` to `end`: its squares are summed or, if
 * `inv` is given, it moves. (All of it in one function, which saves half of a short row's time.) */
__attribute__((flatten)) static double each_run(
    const int64_t *r, int64_t grad, int64_t row, int64_t begin, int64_t end, const Numbers *k,
    const Step *s, const float *inv, float b) {
    int64_t size = s->half ? 2 : 4;
    char *p = (char *)r[P], *m = (char *)(r[BUF] ? r[BUF] : r[P]);
    const char *g = (const char *)grad;
    double sum = 0;
    if (r[DENSE]) {
        int64_t at = (row * r[LENGTH] + begin) * size;
        Run run = {p + at, m + at, g + at, end - begin, 1, 1, 1};
        if (!inv) return squares(run, k, s);
        move(run, k, s, *inv, b);
        return 0;
    }
    const int64_t *sizes = r + LAYOUT, *sp = sizes + 4, *sg = sp + 6, *sm = sg + 6;
    int64_t inner = sizes[3], i = row / sizes[0], j = row % sizes[0];
    for (int64_t e = begin; e < end;) {
        int64_t c = e / inner % sizes[2], d = e / (inner * sizes[2]) % sizes[1];
        int64_t f = e / (inner * sizes[2] * sizes[1]), at = e % inner;
        int64_t n = inner - at < end - e ? inner - at : end - e;
#define SPOT(to) (size * (i * to[0] + j * to[1] + f * to[2] + d * to[3] + c * to[4] + at * to[5]))
        Run run = {p + SPOT(sp), m + SPOT(sm), g + SPOT(sg), n, sp[5], sg[5], sm[5]};
        if (!inv)
            sum += squares(run, k, s);
        else
            move(run, k, s, *inv, b);
        e += n;
    }
    return sum;
}

/* A family's row of which the sum of squares is known: its new b, and whether that is finite. */
static float propose(const int64_t *f, int64_t row, double sq, const Numbers *k, const Step *s,
                     int *finite) {
    int hold = s->records[f[FIRST] * WORDS + HOLD] != 0;
    float new = next_b(shared_b(f, row, s), sq, k, s, hold);
    *finite = isfinite(new) && isfinite(sq);
    return new;
}

/* An item of whole rows: each from its norm to its move, while it is in the cache. */
static void step_rows(const int64_t *item, int mode, const Step *s) {
    const int64_t *f = s->families + item[OF] * FAMILY, *first = s->records + f[FIRST] * WORDS;
    const int64_t *grads = s->grads + f[FIRST];
    Numbers k = numbers(first, s);
    if (k.lam == 0) return; /* a step without rate changes nothing */
    for (int64_t n = 0; n < item[COUNT]; n++) {
        int64_t row = item[ROW] + n;
        double sq = mode == REST ? s->sums[item[SLOT] + n] : 0;
        for (int64_t i = 0; i < f[MEMBERS] && mode != REST; i++) {
            const int64_t *r = first + i * WORDS;
            sq += each_run(r, grads[i], row, 0, r[LENGTH], &k, s, 0, 0);
        }
        int finite;
        float b, inv, new = propose(f, row, sq, &k, s, &finite);
        if (mode == LOOK) {
            s->sums[item[SLOT] + n] = sq;
#pragma omp atomic
            s->bad[item[OF]] += !finite;
            continue;
        }
        for (int64_t i = 0; i < f[MEMBERS]; i++) {
            const int64_t *r = first + i * WORDS;
            if (settle(r, row, new, finite, &k, s, &inv, &b))
                each_run(r, grads[i], row, 0, r[LENGTH], &k, s, &inv, b);
        }
    }
}

/* A long row, once its pieces are summed. */
static void settle_long(const int64_t *l, int mode, const Step *s) {
    const int64_t *f = s->families + l[L_OF] * FAMILY, *first = s->records + f[FIRST] * WORDS;
    Numbers k = numbers(first, s);
    double sq = 0;
    for (int64_t i = 0; i < l[L_PIECES]; i++) sq += s->sums[l[L_FIRST] + i];
    int finite;
    float *factor = s->factors + 2 * l[L_FACTOR], new = propose(f, l[L_ROW], sq, &k, s, &finite);
    if (mode == LOOK) s->bad[l[L_OF]] += !finite && k.lam != 0;
    for (int64_t i = 0; i < f[MEMBERS] && mode != LOOK; i++, factor += 2) {
        const int64_t *r = first + i * WORDS;
        if (k.lam == 0 || !settle(r, l[L_ROW], new, finite, &k, s, factor, factor + 1))
            factor[1] = 0; /* it stays */
    }
}

/* A piece of a long row: its sum or, with the factors found since, its move. */
static double step_piece(const int64_t *item, const float *factor, const Step *s) {
    const int64_t *r = s->records + item[RECORD] * WORDS;
    Numbers k = numbers(r, s);
    if (k.lam == 0 || (factor && factor[1] == 0)) return 0;
    return each_run(r, s->grads[item[RECORD]], item[P_ROW], item[BEGIN], item[END], &k, s, factor,
                    factor ? factor[1] : 0);
}

/* A step, or a part of it. */
void step(const Step *s, int mode, int threads) {
    for (int64_t i = 0; i < s->how_many && mode != LOOK && s->rule != ADAM; i++) {
        const int64_t *f = s->families + i * FAMILY, *r = s->records + f[FIRST] * WORDS;
        int moves = numbers(r, s).lam != 0;
        for (int64_t j = 0; j < f[MEMBERS]; j++) *(float *)r[j * WORDS + T] += moves;
    }
    int64_t summed = mode == REST ? 0 : s->cut, moved = mode == LOOK ? 0 : s->cut;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < s->whole + summed; i++) {
        if (i < s->whole)
            step_rows(s->rows + i * ITEM, mode, s);
        else
            s->sums[i - s->whole] = step_piece(s->pieces + (i - s->whole) * PIECE, 0, s);
    }
    for (int64_t i = 0; i < s->long_rows; i++) settle_long(s->longs + i * LONG, mode, s);
    if (!moved) return;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < moved; i++) {
        const int64_t *item = s->pieces + i * PIECE;
        step_piece(item, s->factors + 2 * item[FACTOR], s);
    }
}
