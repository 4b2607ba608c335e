/* A snapshot of every tensor of a step, as words, in one call.

   It is the key under which a fused step is cached: the parameters; type, device, shape, strides and
   place of each of them and of its state; and the same of its gradient, whose place is noted apart,
   since it may be another every time. Equal snapshots are equal bytes.

   From Python the same takes three times as long, nearly all of it calls. Tensors are read through
   DLPack's C interface, Python's objects through its own; what is needed of either is declared
   here, so that no headers are, and one build serves every Python. */

#include <stdint.h>
#include <string.h>

typedef struct {
    void *data;
    int32_t device[2];
    int32_t dims;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} Tensor; /* DLPack's DLTensor */

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *export_managed, *import_managed;
    int (*export)(void *object, Tensor *out); /* reads an object that is a tensor of torch's */
    void *stream;
} Exchange; /* DLPack's DLPackExchangeAPI, of major version 1 */

typedef struct {
    const Exchange *exchange;
    int64_t (*list_size)(void *list);
    void *(*list_item)(void *list, int64_t i);
    int (*dict_next)(void *dict, int64_t *place, void **key, void **value);
    void *(*attribute)(void *object, void *name);
    void *(*type)(void *object);
    void *(*call)(void *callable, ...);
    int (*is_true)(void *object);
    void (*release)(void *object);
    void (*clear_error)(void);
    void *none, *grad, *is_neg; /* None, a name, and a method: is the sign still to be turned? */
    void *tensor, *parameter;   /* the types that are read here */
} Python;

typedef struct {
    int64_t *at, *end, *gradients;
} Words;

enum { SAME = -2, MORE_ROOM = -1, UNREADABLE = 0, DONE = 1 };

static int put(Words *w, int64_t word) {
    if (w->at == w->end) return MORE_ROOM;
    *w->at++ = word;
    return DONE;
}

#define TRY(x) do { int done = (x); if (done != DONE) return done; } while (0)

typedef struct {
    int64_t begin, end;
} Span; /* of memory */

/* Type, device, shape and strides. A subclass may say anything of itself: Python reads it. */
static int put_tensor(const Python *py, Words *w, void *object, Span *span) {
    Tensor t;
    void *type = py->type(object);
    py->release(type); /* which its object holds */
    if (type != py->tensor && type != py->parameter) return UNREADABLE;
    TRY(put(w, (intptr_t)type));
    if (py->exchange->export(object, &t)) {
        py->clear_error();
        return UNREADABLE;
    }
    span->begin = (intptr_t)t.data + (int64_t)t.offset;
    if (!span->begin) return UNREADABLE;
    TRY(put(w, t.code | t.bits << 8 | (int64_t)t.lanes << 16 | (int64_t)t.dims << 32));
    TRY(put(w, t.device[0] | (int64_t)t.device[1] << 32));
    int64_t reach = 1;
    for (int i = 0; i < t.dims; i++) {
        TRY(put(w, t.shape[i]));
        TRY(put(w, t.strides[i]));
        reach += (t.shape[i] - 1) * t.strides[i];
    }
    span->end = span->begin + reach * (t.bits / 8);
    return DONE;
}

/* Whether what lies in memory has the other sign than the tensor: then only torch can read it. */
static int is_negated(const Python *py, void *tensor) {
    void *answer = py->call(py->is_neg, tensor, (void *)0);
    int negated = !answer || py->is_true(answer);
    if (answer) py->release(answer);
    return negated;
}

static int put_gradient(const Python *py, Words *w, void *g, const Span *of_p) {
    Span of_g;
    TRY(put(w, g == py->none));
    if (g == py->none) return DONE;
    TRY(put_tensor(py, w, g, &of_g));
    TRY(put(w, of_g.begin < of_p->end && of_p->begin < of_g.end)); /* whether they overlap */
    *w->gradients++ = of_g.begin;
    return is_negated(py, g) ? UNREADABLE : DONE;
}

static int put_parameter(const Python *py, Words *w, void *p) {
    Span span;
    TRY(put(w, (intptr_t)p));
    TRY(put_tensor(py, w, p, &span));
    TRY(put(w, span.begin));
    /* Only parts of complex numbers can be negated, which have no neighbours. */
    if (w->at[-2] != 1 && is_negated(py, p)) return UNREADABLE;
    void *g = py->attribute(p, py->grad);
    if (!g) return UNREADABLE;
    int done = put_gradient(py, w, g, &span);
    py->release(g);
    return done;
}

static int put_state(const Python *py, Words *w, void *state) {
    int64_t outer = 0;
    Span span;
    void *p, *of_p, *name, *value;
    while (py->dict_next(state, &outer, &p, &of_p)) {
        TRY(put(w, (intptr_t)p)); /* whose state it is */
        for (int64_t inner = 0; py->dict_next(of_p, &inner, &name, &value);) {
            TRY(put(w, (intptr_t)name));
            TRY(put_tensor(py, w, value, &span));
            TRY(put(w, span.begin));
        }
    }
    return DONE;
}

/* How many words the parameters of a list, their gradients and their state (a dict of dicts) take;
   0 if one of them can only be read from Python, -1 if there is no room for the words, -2 if they
   are the `before` words of an earlier call. `gradients` gets the number of gradients, and where
   each of them lies. */
int64_t snapshot(const Python *py, void *params, void *state, int64_t *words, int64_t room,
                 const int64_t *before, int64_t n_before, int64_t *gradients) {
    Words w = {words, words + room, gradients + 1};
    int64_t n = py->list_size(params);
    int done = put(&w, n);
    for (int64_t i = 0; i < n && done == DONE; i++)
        done = put_parameter(py, &w, py->list_item(params, i));
    if (done == DONE) done = put_state(py, &w, state);
    if (done != DONE) py->clear_error();
    *gradients = w.gradients - gradients - 1;
    if (done != DONE) return done;
    n = w.at - words;
    return n == n_before && !memcmp(words, before, n * sizeof *words) ? SAME : n;
}
