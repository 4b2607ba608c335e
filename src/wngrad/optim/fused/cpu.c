/* The fused step for a CPU: a row's norm, its b and its move while its gradient is in the cache.
 *
 * `wngrad.optim.step` is the reference; tests/test_engines.py holds this file to it.
 * `wngrad.optim.fused.cpu` lays out the tables and calls `step`, which is compiled for several
 * instruction sets; `LEVEL` is the name of one.
 *
 * A block of entries that share one b is a row; parameters that share their b do so row by row.
 * Rows are dealt out to threads as items of some rows each; a row that is too long for that is cut
 * into pieces, summed first and moved in a second pass.
 * Parameters, gradients and buffers are in float32 or bfloat16, b and t in float32. Sums of squares,
 * b's recursion and rates are in float64, everything else in float32, rounded where torch's own
 * operations round (compile with -ffp-contract=off): with a lam that is a number the step is that of
 * the reference bit for bit (tried on x86), for any number of threads and any width of vectors.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

enum { ALL, CHECK, REST };  /* a step; or its sums, to be checked, and then what is left of it */
enum { GRADIENT_ITSELF, MOMENTUM, RUNNING_MEAN, ADAM };
enum { NONE, COUPLED, DECOUPLED, BY_RATE }; /* weight decay */
#define LANES 32                   /* sums side by side, whatever the machine */
#define FLOOR 0x1p-103             /* float32's smallest normal number over its epsilon */

/* As in wngrad/optim/fused/records.py, field for field. */
typedef struct {
    double lam;
    int64_t lam_kind;
    double mu, log_mu, weight_decay, c, sign, eta;
} Group;

typedef struct {
    int64_t p, b, buffer, rms, average, t, skipped, norm;
    double scale, log_beta2, old_rms, new_rms; /* of Adam's direction */
    int64_t length, group, hold, dense;
    int64_t sizes[4], strides[5][6]; /* of p, gradient, buffer, rms, average */
} Parameter;

typedef struct {
    int64_t first, members, absent, absents; /* parameters, and the b of those not here */
} Shared;

typedef struct {
    int64_t shared, row, count, sum;
} Rows;

typedef struct {
    int64_t parameter, row, factor, begin, end;
} Piece;

typedef struct {
    int64_t shared, row, factor, pieces, first;
} LongRow;

typedef struct {
    const Parameter *parameters;
    const Shared *shared;
    const int64_t *absent;
    const Rows *rows;
    const Piece *pieces;
    const LongRow *long_rows;
    int64_t n_shared, n_rows, n_pieces, n_long_rows;
    double *sums;   /* of pieces; then of whole rows, where they are checked first */
    float *factors; /* two for each parameter of each long row */
    int32_t *bad;   /* rows of each shared that are not finite */
    const Group *groups;
    const int64_t *gradients;
    int64_t rule, decay, skip, latch, rated; /* rated: lam is in the rule for b */
    int64_t averages, half;                  /* half: in bfloat16 instead of float32 */
    int64_t proposed; /* in the gradient's place is what was made of it, in float32 */
    const float *scale, *found_inf;         /* of a GradScaler, or null */
    void (*parallel)(void (*work)(void *), void *with, unsigned threads, unsigned flags);
} Step; /* cpu.py has it field for field; `parallel` is libgomp's GOMP_parallel, or null */

#ifdef FIRST_LEVEL
const int64_t record_sizes[] = {sizeof(Group), sizeof(Parameter), sizeof(Shared), sizeof(Rows),
                                sizeof(Piece), sizeof(LongRow), sizeof(Step)};
const char source[] = SOURCE;

/* The best instruction set of this machine that the library was compiled for. */
int level(void) {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? 2
               : 1;
#else
    return 0;
#endif
}
#endif

typedef struct {
    double lam, measured, beta, log_mu, c, scale_u, log_beta2;
    float sign, mu, rest, decay, keep, scale, eta, old_rms, new_rms;
    float t, unbiased, share; /* a step, and what depends on its number: see `count` */
} Numbers;

typedef struct {
    char *p, *m, *r, *a;
    const char *g;
    int64_t n, dp, dg, dm, dr, da; /* elements, and the distance between neighbours */
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

static Numbers numbers(const Parameter *r, const Step *s) {
    const Group *group = s->groups + r->group;
    Numbers k;
    k.lam = s->found_inf && *s->found_inf != 0 ? 0.0 : group->lam;
    k.measured = s->rated ? k.lam : 1;
    k.log_mu = group->log_mu, k.c = group->c, k.scale_u = r->scale, k.log_beta2 = r->log_beta2;
    k.sign = s->proposed ? 1 : (float)group->sign;
    k.beta = group->mu, k.mu = (float)group->mu, k.rest = (float)(1 - group->mu), k.decay = (float)group->weight_decay;
    k.keep = (float)(1 - k.lam * group->weight_decay);
    k.scale = s->scale ? *s->scale : 1;
    k.eta = (float)group->eta, k.old_rms = (float)r->old_rms, k.new_rms = (float)r->new_rms;
    k.t = -1;
    return k;
}

/* What depends on the number of the step: Adam's scale sqrt(1-beta2^t)/(1-beta^t), Algorithm 4's
 * 1/(1-beta^t), and how much of x the average takes over. */
static __attribute__((noinline)) void count(Numbers *k, const Step *s, float t) {
    if (t == k->t) return;
    k->t = t;
    if (s->rule == ADAM)
        k->unbiased = (float)(k->scale_u * (sqrt(1 - exp2(t * k->log_beta2)) /
                                            (1 - exp2(t * k->log_mu))));
    if (s->rule == RUNNING_MEAN) k->unbiased = (float)(1 / (1 - exp2(t * k->log_mu)));
    if (s->averages) k->share = 1 / (t + k->eta) * (k->eta + 1);
}

/* x + w (y - x), from the end that is nearer. */
INLINE float lerp(float x, float y, float w) {
    return fabsf(w) < 0.5f ? fmaf(w, y - x, x) : fmaf(w - 1, y - x, y);
}

/* Adam's direction scale m/sqrt(v), and m and sqrt(v) as they will be. */
INLINE float adam(float g, const Numbers *k, float *m, float *rms) {
    float old = k->old_rms * *rms, new = k->new_rms * g;
    *m = lerp(*m, g, k->rest);
    *rms = (float)sqrt((double)old * old + (double)new * new);
    if (isinf(old) || isinf(new)) *rms = INFINITY;
    return k->unbiased * (*rms == 0 ? *m : *m / *rms);
}

/* The gradient the rule sees: unscaled, of -f if maximizing, with coupled decay in it. */
#define GRADIENT(g, p) \
    (decay == COUPLED ? k->sign * (scaled ? (g) / k->scale : (g)) + k->decay * (p) \
                      : k->sign * (scaled ? (g) / k->scale : (g)))

INLINE double squares_of(Run r, const Numbers *k, int scaled, int decay, int64_t dp, int64_t dg,
                         int half) {
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
    if (r.n < LANES) return sum;
#define FOLD(n) for (int j = 0; j < n; j++) sums[j] += sums[j + n];
    FOLD(16) FOLD(8) FOLD(4) FOLD(2)
    return sum + (sums[0] + sums[1]);
}

static __attribute__((noinline)) double squares_of_adam(Run r, const Numbers *k, int scaled, int decay, int half) {
    double sum = 0;
    for (int64_t i = 0; i < r.n; i++) {
        float m = get(r.m, i * r.dm, half), rms = get(r.r, i * r.dr, half);
        double u = adam(GRADIENT(get(r.g, i * r.dg, half), get(r.p, i * r.dp, half)), k, &m, &rms);
        sum += u * u;
    }
    return sum;
}

static double squares(Run r, const Numbers *k, const Step *s) {
    int scaled = s->scale != 0;
    if (s->rule == ADAM) return squares_of_adam(r, k, scaled, s->decay, s->half);
    if (s->proposed && r.dg == 1) return squares_of(r, k, 0, NONE, 1, 1, 0);
    if (s->proposed) return squares_of(r, k, 0, NONE, 1, r.dg, 0);
    if (r.dp != 1 || r.dg != 1) return squares_of(r, k, scaled, s->decay, r.dp, r.dg, s->half);
#define CASE(S, D, H) \
    if (scaled == S && (s->decay == COUPLED) == (D == COUPLED) && s->half == H) \
        return squares_of(r, k, S, D, 1, 1, H);
    CASE(0, COUPLED, 0) CASE(0, COUPLED, 1) CASE(0, NONE, 0) CASE(0, NONE, 1)
    CASE(1, COUPLED, 0) CASE(1, COUPLED, 1) CASE(1, NONE, 0)
#undef CASE
    return squares_of(r, k, 1, NONE, 1, 1, 1);
}

/* As torch moves in place; bfloat16 is widened first, and rounded at the end. `wide`: a gradient in
 * float32 all the same. By momentum and Algorithm 4 what m holds are steps, each with the lam of its
 * own: m <- kept m + rate g; `kept` is mu, or beta b_{j-1}/b_j, `rate` lam/b_j, or (1-beta) lam/b_j. */
INLINE void move_of(Run r, const Numbers *k, int scaled, float rate, float kept, int rule, int decay,
                    int averages, int half, int wide, int64_t dp, int64_t dg, int64_t dm,
                    int64_t dr, int64_t da) {
    char *restrict p = r.p, *restrict m = r.m, *restrict v = r.r, *restrict a = r.a;
    const char *restrict gs = r.g;
    float keep = decay == BY_RATE ? 1 - rate * k->decay : k->keep;
    for (int64_t i = 0; i < r.n; i++) {
        float x = get(p, i * dp, half), g = GRADIENT(get(gs, i * dg, half && !wide), x), mean, rms;
        if (decay >= DECOUPLED) x *= keep;
        if (rule == GRADIENT_ITSELF) { /* x_j <- x_{j-1} - (lam/b_j) g */
            x = fmaf(-g, rate, x);
        } else if (rule == MOMENTUM) { /* x_j <- x_{j-1} - m */
            mean = fmaf(g, rate, kept * get(m, i * dm, half));
            x -= mean;
            put(m, i * dm, mean, half);
        } else if (rule == ADAM) {
            mean = get(m, i * dm, half), rms = get(v, i * dr, half);
            x = fmaf(-adam(g, k, &mean, &rms), rate, x);
            put(m, i * dm, mean, half);
            put(v, i * dr, rms, half);
        } else { /* x_j <- x_{j-1} - m/(1-beta^t) */
            mean = fmaf(g, rate, kept * get(m, i * dm, half));
            x = fmaf(-mean, k->unbiased, x);
            put(m, i * dm, mean, half);
        }
        if (averages) put(a, i * da, lerp(get(a, i * da, 0), x, k->share), 0);
        put(p, i * dp, x, half);
    }
}

#define KEY(S, R, D, A, H, W) ((S) << 7 | (R) << 5 | (D) << 3 | (A) << 2 | (H) << 1 | (W))
#define CASE(S, R, D, A, H, W) \
    case KEY(S, R, D, A, H, W): \
        move_of(r, k, S, rate, kept, R, D, A, H, W, 1, 1, 1, 1, 1); \
        return;
#define HALVES(S, R, D, A) CASE(S, R, D, A, 0, 0) CASE(S, R, D, A, 1, 0)
#define CASES(S, R, A) HALVES(S, R, NONE, A) HALVES(S, R, COUPLED, A) HALVES(S, R, DECOUPLED, A)
#define PROPOSED(D) \
    CASE(0, GRADIENT_ITSELF, D, 0, 0, 1) CASE(0, GRADIENT_ITSELF, D, 1, 0, 1) \
    CASE(0, GRADIENT_ITSELF, D, 0, 1, 1) CASE(0, GRADIENT_ITSELF, D, 1, 1, 1)

/* Apart from the others, since a function of too many loops is compiled with less care. */
static __attribute__((noinline)) void move_otherwise(Run r, const Numbers *k, const Step *s,
                                                     float rate, float kept) {
    int scaled = s->scale != 0 && !s->proposed;
    if (r.dp == 1 && r.dg == 1 && r.dm == 1 && r.dr == 1 && r.da == 1)
        switch (KEY(scaled, s->rule, s->decay, s->averages, s->half, s->proposed)) {
            CASES(1, GRADIENT_ITSELF, 0) CASES(1, MOMENTUM, 0) CASES(1, RUNNING_MEAN, 0)
            CASES(0, GRADIENT_ITSELF, 1) CASES(0, MOMENTUM, 1) CASES(0, RUNNING_MEAN, 1)
            HALVES(0, ADAM, NONE, 0) HALVES(0, ADAM, NONE, 1) PROPOSED(NONE) PROPOSED(BY_RATE)
        }
    move_of(r, k, scaled, rate, kept, s->rule, s->decay, s->averages, s->half, s->proposed, r.dp,
            r.dg, r.dm, r.dr, r.da);
}

static void move(Run r, const Numbers *k, const Step *s, float rate, float kept) {
    if (r.dp == 1 && r.dg == 1 && r.dm == 1)
        switch (KEY(s->scale != 0, s->rule, s->decay, s->averages, s->half, s->proposed)) {
            CASES(0, GRADIENT_ITSELF, 0) CASES(0, MOMENTUM, 0) CASES(0, RUNNING_MEAN, 0)
        }
    move_otherwise(r, k, s, rate, kept);
}

/* b_j <- b_{j-1} + lam^2 |g|^2/b_{j-1}; NaN where it would be infinite. */
static float next_b(float b, double sq, const Numbers *k, const Step *s, int hold) {
    double wide = b;
    if (s->latch && wide == 0) { /* b_1 <- C lam |g_1| where a row meets its first gradient */
        double norm = sqrt(sq), first = k->c * k->measured * norm;
        if (norm >= FLOOR && first >= FLOOR) wide = first;
    } else if (wide == 0) { /* b_1 is a number, and was not when the row's state was made */
        wide = k->c;
    }
    if (!hold) wide = wide == 0 ? 0 * sq : wide + k->measured * k->measured * sq / wide;
    float new = (float)wide;
    return isinf(new) ? NAN : new;
}

/* The b that a row starts from: b never decreases, so the largest of its members is the latest. */
static float shared_b(const Shared *f, int64_t row, const Step *s) {
    const Parameter *first = s->parameters + f->first;
    const int64_t *absent = s->absent + f->absent;
    float b = ((const float *)first->b)[row];
    for (int64_t i = 1; i < f->members + f->absents; i++) {
        int64_t place = i < f->members ? first[i].b : absent[i - f->members];
        float x = ((const float *)place)[row];
        if (x > b || isnan(x)) b = x;
    }
    return b;
}

/* Store a parameter's b, t and skips of a row; whether it moves, its rate, and what it keeps of m. */
static int store(const Parameter *r, int64_t row, float new, int finite, Numbers *k, const Step *s,
                 float *rate, float *kept) {
    double before = ((float *)r->b)[row], b = new == 0 ? 1 : new, factor = 1 / b;
    double lam = r->norm ? *(const float *)r->norm * k->lam : k->lam; /* each member has its own norm */
    if (s->skip && !finite) {
        ((int32_t *)r->skipped)[row]++;
        return 0;
    }
    ((float *)r->b)[row] = new;
    if (s->latch && new == 0) return 0;
    if (s->rule >= RUNNING_MEAN) ((float *)r->t)[row] += 1;
    *kept = k->mu;
    if (s->rule == RUNNING_MEAN) *kept = (float)(k->beta * (before / b)), factor = (1 - k->beta) / b;
    *rate = (float)(factor * lam);
    return 1;
}

/* What is done to each run of a row's elements from `begin` to `end`: its squares are summed or, if
 * `rate` is given, it moves. (All of it in one function, which saves half of a short row's time.) */
__attribute__((flatten)) static double each_run(
    const Parameter *r, int64_t grad, int64_t row, int64_t begin, int64_t end, Numbers *k,
    const Step *s, const float *rate, float kept) {
    int64_t size = s->half ? 2 : 4, size_g = s->proposed ? 4 : size;
    char *p = (char *)r->p, *m = (char *)(r->buffer ? r->buffer : r->p);
    char *v = (char *)(r->rms ? r->rms : r->p), *a = (char *)(r->average ? r->average : r->p);
    const char *g = (const char *)grad;
    double sum = 0;
    /* Steps are counted before a row moves, and after its squares are summed. */
    if (s->rule == ADAM || ((s->averages || s->rule == RUNNING_MEAN) && rate))
        count(k, s, ((const float *)r->t)[s->rule >= RUNNING_MEAN ? row : 0] + !rate);
    if (r->dense) {
        int64_t i = row * r->length + begin, at = i * size;
        Run run = {p + at, m + at, v + at, a + 4 * i, g + size_g * i, end - begin, 1, 1, 1, 1, 1};
        if (!rate) return squares(run, k, s);
        move(run, k, s, *rate, kept);
        return 0;
    }
    const int64_t *sizes = r->sizes, *sp = r->strides[0], *sg = r->strides[1];
    const int64_t *sm = r->strides[2], *sv = r->strides[3], *sa = r->strides[4];
    int64_t inner = sizes[3], i = row / sizes[0], j = row % sizes[0];
    for (int64_t e = begin; e < end;) {
        int64_t c = e / inner % sizes[2], d = e / (inner * sizes[2]) % sizes[1];
        int64_t f = e / (inner * sizes[2] * sizes[1]), at = e % inner;
        int64_t n = inner - at < end - e ? inner - at : end - e;
#define SPOT(to) (i * to[0] + j * to[1] + f * to[2] + d * to[3] + c * to[4] + at * to[5])
        Run run = {p + size * SPOT(sp), m + size * SPOT(sm), v + size * SPOT(sv), a + 4 * SPOT(sa),
                   g + size_g * SPOT(sg), n, sp[5], sg[5], sm[5], sv[5], sa[5]};
        if (!rate)
            sum += squares(run, k, s);
        else
            move(run, k, s, *rate, kept);
        e += n;
    }
    return sum;
}

/* A row of which the sum of squares is known: its new b, and whether that is finite. */
static float propose(const Shared *f, int64_t row, double sq, const Numbers *k, const Step *s,
                     int *finite) {
    int hold = s->parameters[f->first].hold != 0;
    float new = next_b(shared_b(f, row, s), sq, k, s, hold);
    *finite = isfinite(new) && isfinite(sq);
    return new;
}

/* An item of whole rows: each from its norm to its move, while it is in the cache. */
static void step_rows(const Rows *item, int mode, const Step *s) {
    const Shared *f = s->shared + item->shared;
    const Parameter *first = s->parameters + f->first;
    const int64_t *grads = s->gradients + f->first;
    Numbers k = numbers(first, s);
    if (k.lam == 0) return; /* a step without rate changes nothing */
    for (int64_t n = 0; n < item->count; n++) {
        int64_t row = item->row + n;
        double sq = mode == REST ? s->sums[item->sum + n] : 0;
        for (int64_t i = 0; i < f->members && mode != REST; i++)
            sq += each_run(first + i, grads[i], row, 0, first[i].length, &k, s, 0, 0);
        int finite;
        float kept, rate, new = propose(f, row, sq, &k, s, &finite);
        if (mode == CHECK) {
            s->sums[item->sum + n] = sq;
            __atomic_fetch_add(s->bad + item->shared, !finite, __ATOMIC_RELAXED);
            continue;
        }
        for (int64_t i = 0; i < f->members; i++)
            if (store(first + i, row, new, finite, &k, s, &rate, &kept))
                each_run(first + i, grads[i], row, 0, first[i].length, &k, s, &rate, kept);
    }
}

/* A long row, once its pieces are summed. */
static void step_long_row(const LongRow *l, int mode, const Step *s) {
    const Shared *f = s->shared + l->shared;
    const Parameter *first = s->parameters + f->first;
    Numbers k = numbers(first, s);
    double sq = 0;
    for (int64_t i = 0; i < l->pieces; i++) sq += s->sums[l->first + i];
    int finite;
    float *factor = s->factors + 2 * l->factor, new = propose(f, l->row, sq, &k, s, &finite);
    if (mode == CHECK) s->bad[l->shared] += !finite && k.lam != 0;
    for (int64_t i = 0; i < f->members && mode != CHECK; i++, factor += 2)
        if (k.lam == 0 || !store(first + i, l->row, new, finite, &k, s, factor, factor + 1))
            factor[1] = -1; /* it stays */
}

/* A piece of a long row: its sum or, with the factors found since, its move. */
static double step_piece(const Piece *item, const float *factor, const Step *s) {
    const Parameter *r = s->parameters + item->parameter;
    Numbers k = numbers(r, s);
    if (k.lam == 0 || (factor && factor[1] < 0)) return 0;
    return each_run(r, s->gradients[item->parameter], item->row, item->begin, item->end, &k, s,
                    factor, factor ? factor[1] : 0);
}

/* What threads do together: items 0 to `items`, each taken by whoever is free. */
typedef struct {
    const Step *s;
    int64_t next, items;
    int mode, moves;
} Work;

static void work(void *of) {
    Work *w = of;
    const Step *s = w->s;
    for (;;) {
        int64_t i = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED);
        if (i >= w->items) return;
        if (w->moves) {
            const Piece *item = s->pieces + i;
            step_piece(item, s->factors + 2 * item->factor, s);
        } else if (i < s->n_rows) {
            step_rows(s->rows + i, w->mode, s);
        } else {
            s->sums[i - s->n_rows] = step_piece(s->pieces + (i - s->n_rows), 0, s);
        }
    }
}

static void together(Work w, int threads) {
    if (threads > 1 && w.s->parallel && w.items > 1)
        w.s->parallel(work, &w, threads, 0);
    else
        work(&w);
}

/* A step, or a part of it. */
void JOIN(step, LEVEL)(const Step *s, int mode, int threads) {
    for (int64_t i = 0; i < s->n_shared && mode != CHECK && s->rule < RUNNING_MEAN; i++) {
        const Shared *f = s->shared + i;
        const Parameter *r = s->parameters + f->first;
        int moves = numbers(r, s).lam != 0;
        for (int64_t j = 0; j < f->members; j++) *(float *)r[j].t += moves;
    }
    int64_t summed = mode == REST ? 0 : s->n_pieces;
    together((Work){s, 0, s->n_rows + summed, mode, 0}, threads);
    for (int64_t i = 0; i < s->n_long_rows; i++) step_long_row(s->long_rows + i, mode, s);
    if (mode != CHECK) together((Work){s, 0, s->n_pieces, mode, 1}, threads);
}
