// What a CPU with AVX2 can do of `minmax` in groups of 32, written with intrinsics and without regard for anything else:
// the yardstick of kernels_beside_c.py. Codes and scales are kizami's, bit for bit.
//
// codes: uint8 e4m3 [32 * chunks]; block: float32 block scale of each chunk; out: int32 [4 * chunks].
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static float rounded(float x) { // to BF16, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u;
    memcpy(&x, &bits, 4);
    return x;
}

static __m256 rounded8(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i low = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), low);
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32((int)0xFFFF0000)));
}

static __m256 decoded8(const uint8_t *codes, __m256 scale) {
    __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes));
    __m256i bits = _mm256_and_si256(_mm256_slli_epi32(wide, 20), _mm256_set1_epi32((int)0x87F00000));
    return _mm256_mul_ps(_mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f)), scale);
}

static __m256 code8(__m256 weight, __m256 step) { // compressed-tensors' chain: BF16 weight, BF16 quotient
    __m256 quotient = rounded8(_mm256_div_ps(rounded8(weight), step));
    return _mm256_min_ps(_mm256_max_ps(quotient, _mm256_set1_ps(-8)), _mm256_set1_ps(7));
}

static void store_nibbles(const __m256i q[4], int32_t *out) {
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    bytes = _mm256_add_epi8(bytes, _mm256_set1_epi8(8));
    __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001)); // low + 16 * high
    __m128i words = _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    _mm_storeu_si128((__m128i *)out, words);
}

int maxima(const uint8_t *codes, size_t chunks, uint8_t *largest) { // returns 1 where there is a NaN
    int nan = 0;
    for (size_t k = 0; k < chunks; k++) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(codes + 32 * k));
        x = _mm256_xor_si256(_mm256_and_si256(x, _mm256_set1_epi8(0x7F)), _mm256_set1_epi8(-1)); // the smallest is it
        __m128i y = _mm_min_epu8(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        y = _mm_and_si128(_mm_min_epu8(y, _mm_srli_epi16(y, 8)), _mm_set1_epi16(255));
        largest[k] = (uint8_t)(255 - _mm_extract_epi16(_mm_minpos_epu16(y), 0));
        nan |= largest[k] == 127;
    }
    return nan;
}

void scales(const uint8_t *largest, const float *block, size_t chunks, float *step, uint16_t *scale) {
    for (size_t k = 0; k < chunks; k++) {
        uint32_t bits = (uint32_t)largest[k] << 20;
        float weight;
        memcpy(&weight, &bits, 4);
        float s = rounded(rounded(weight * 0x1p120f * block[k]) / 7.5f);
        step[k] = s = s == 0 ? 0x1p-7f : s;
        memcpy(&bits, &s, 4);
        scale[k] = (uint16_t)(bits >> 16);
    }
}

void pack(const uint8_t *codes, const float *block, const float *step, size_t chunks, int32_t *out) {
    for (size_t k = 0; k < chunks; k++) {
        __m256 b = _mm256_set1_ps(block[k]), s = _mm256_set1_ps(step[k]);
        __m256i q[4];
        for (int i = 0; i < 4; i++)
            q[i] = _mm256_cvtps_epi32(code8(decoded8(codes + 32 * k + 8 * i, b), s));
        store_nibbles(q, out + 4 * k);
    }
}

static __m256d plus_squares(__m256d sum, __m256 x) {
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    return _mm256_add_pd(sum, _mm256_add_pd(_mm256_mul_pd(low, low), _mm256_mul_pd(high, high)));
}

static double total(__m256d sum) {
    double lanes[4];
    _mm256_storeu_pd(lanes, sum);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

// figures [5], added to: squares of W, of the error, of q*s; largest |error|; clipped weights
void pack_with_figures(
    const uint8_t *codes, const float *block, const float *step, size_t chunks, int32_t *out, double *figures) {
    __m256d w2 = _mm256_setzero_pd(), e2 = w2, q2 = w2;
    __m256 largest = _mm256_setzero_ps();
    long clipped = 0;
    for (size_t k = 0; k < chunks; k++) {
        __m256 b = _mm256_set1_ps(block[k]), s = _mm256_set1_ps(step[k]), integers = _mm256_setzero_ps();
        __m256 high = _mm256_set1_ps(7.5f * step[k]), low = _mm256_set1_ps(-8.5f * step[k]);
        __m256i q[4];
        for (int i = 0; i < 4; i++) {
            __m256 weight = decoded8(codes + 32 * k + 8 * i, b);
            q[i] = _mm256_cvtps_epi32(code8(weight, s));
            __m256 code = _mm256_cvtepi32_ps(q[i]);
            __m256 error = _mm256_sub_ps(weight, _mm256_mul_ps(code, s));
            w2 = plus_squares(w2, weight);
            e2 = plus_squares(e2, error);
            integers = _mm256_add_ps(integers, _mm256_mul_ps(code, code));
            largest = _mm256_max_ps(largest, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), error));
            __m256 outside = _mm256_or_ps(
                _mm256_cmp_ps(weight, high, _CMP_GT_OQ), _mm256_cmp_ps(weight, low, _CMP_LT_OQ));
            clipped += __builtin_popcount((unsigned)_mm256_movemask_ps(outside));
        }
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(integers), _mm256_extractf128_ps(integers, 1));
        __m256d square = _mm256_set1_pd((double)step[k] * (double)step[k]);
        q2 = _mm256_add_pd(q2, _mm256_mul_pd(square, _mm256_cvtps_pd(half)));
        store_nibbles(q, out + 4 * k);
    }
    float lanes[8];
    _mm256_storeu_ps(lanes, largest);
    for (int i = 0; i < 8; i++)
        figures[3] = lanes[i] > figures[3] ? lanes[i] : figures[3];
    figures[0] += total(w2), figures[1] += total(e2), figures[2] += total(q2), figures[4] += (double)clipped;
}
