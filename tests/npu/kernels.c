/* Kernels that compute nothing: each launch is noted by name and succeeds.
 *
 * stubs.py appends, for every aclnnX that torch_npu looks up, aclnnXGetWorkspaceSize (returns 0) and aclnnX (notes
 * "aclnnX" and returns 0); and constructors and destructors of argument descriptors, which carry nothing.
 */
#include <string.h>

static char launched[1 << 16];
static char descriptor[64];

/* The names since the last call of this function, one a line; the oldest are dropped when there are too many. */
const char *sim_launched(void) {
    static char last[sizeof launched];
    memcpy(last, launched, sizeof launched);
    launched[0] = 0;
    return last;
}

static int launch(const char *name) {
    size_t used = strlen(launched), more = strlen(name) + 1;
    if (used + more >= sizeof launched) used = 0;
    memcpy(launched + used, name, more - 1);
    launched[used + more - 1] = '\n';
    launched[used + more] = 0;
    return 0;
}
