package kvstrata

import (
	"encoding/binary"
	"math/bits"
)

// XXH3 of 64 bits for 17 to 128 bytes, which is what seeds are made of, and of 128 bits for 17 bytes and more, after
// the description in the xxHash repository (doc/xxhash_spec.md). The standard library has neither.

const (
	prime32x1 = 0x9E3779B1
	prime32x2 = 0x85EBCA77
	prime32x3 = 0xC2B2AE3D
	prime64x1 = 0x9E3779B185EBCA87
	prime64x2 = 0xC2B2AE3D27D4EB4F
	prime64x3 = 0x165667B19E3779F9
	prime64x4 = 0x85EBCA77C2B2AE63
	prime64x5 = 0x27D4EB2F165667C5
	primeMix  = 0x165667919E3779F9

	xxhStripe = 64
	xxhBlock  = 1024
	// XXHSizeMin is the least number of bytes that these functions take.
	XXHSizeMin = 17
)

// xxhSecret is the default secret of the description.
var xxhSecret = [192]byte{
	0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
	0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
	0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
	0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
	0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
	0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
	0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
	0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
	0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
	0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
	0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
	0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
}

func u64(data []byte) uint64 { return binary.LittleEndian.Uint64(data) }

func fold(a, b uint64) uint64 {
	high, low := bits.Mul64(a, b)
	return high ^ low
}

func avalanche(h uint64) uint64 {
	h ^= h >> 37
	h *= primeMix
	return h ^ h>>32
}

func mix16(data, secret []byte, seed uint64) uint64 {
	return fold(u64(data)^(u64(secret)+seed), u64(data[8:])^(u64(secret[8:])-seed))
}

// xxh3of64 digests 17 to 128 bytes with seed 0.
func xxh3of64(data []byte) uint64 {
	n, s := len(data), xxhSecret[:]
	h := uint64(n) * prime64x1
	for i := (n - 1) / 32; i >= 0; i-- {
		h += mix16(data[16*i:], s[32*i:], 0) + mix16(data[n-16*(i+1):], s[32*i+16:], 0)
	}
	return avalanche(h)
}

type uint128 struct{ low, high uint64 }

func (h uint128) mix32(one, two, secret []byte, seed uint64) uint128 {
	h.low = (h.low + mix16(one, secret, seed)) ^ (u64(two) + u64(two[8:]))
	h.high = (h.high + mix16(two, secret[16:], seed)) ^ (u64(one) + u64(one[8:]))
	return h
}

func (h uint128) finish(n, seed uint64) uint128 {
	low, high := h.low+h.high, h.low*prime64x1+h.high*prime64x4+(n-seed)*prime64x2
	return uint128{avalanche(low), -avalanche(high)}
}

// xxh3of128 digests 17 bytes or more; the result is in canonical form, 16 bytes with the high half first.
func xxh3of128(data []byte, seed uint64) [16]byte {
	var h uint128
	switch n := len(data); {
	case n <= 128:
		h = xxh128short(data, seed)
	case n <= 240:
		h = xxh128middle(data, seed)
	default:
		h = xxh128long(data, seed)
	}
	var out [16]byte
	binary.BigEndian.PutUint64(out[:], h.high)
	binary.BigEndian.PutUint64(out[8:], h.low)
	return out
}

func xxh128short(data []byte, seed uint64) uint128 {
	n := len(data)
	h := uint128{uint64(n) * prime64x1, 0}
	for i := (n - 1) / 32; i >= 0; i-- {
		h = h.mix32(data[16*i:], data[n-16*(i+1):], xxhSecret[32*i:], seed)
	}
	return h.finish(uint64(n), seed)
}

func xxh128middle(data []byte, seed uint64) uint128 {
	n := len(data)
	h := uint128{uint64(n) * prime64x1, 0}
	for i := 0; i < 4; i++ {
		h = h.mix32(data[32*i:], data[32*i+16:], xxhSecret[32*i:], seed)
	}
	h = uint128{avalanche(h.low), avalanche(h.high)}
	for i := 4; i < n/32; i++ {
		h = h.mix32(data[32*i:], data[32*i+16:], xxhSecret[3+32*(i-4):], seed)
	}
	h = h.mix32(data[n-16:], data[n-32:], xxhSecret[103:], -seed)
	return h.finish(uint64(n), seed)
}

func xxh128long(data []byte, seed uint64) uint128 {
	var secret [192]byte
	for i := 0; i < len(secret); i += 16 {
		binary.LittleEndian.PutUint64(secret[i:], u64(xxhSecret[i:])+seed)
		binary.LittleEndian.PutUint64(secret[i+8:], u64(xxhSecret[i+8:])-seed)
	}
	acc := [8]uint64{prime32x3, prime64x1, prime64x2, prime64x3, prime64x4, prime32x2, prime64x5, prime32x1}
	n := len(data)
	for at := 0; at < (n-1)/xxhBlock*xxhBlock; at += xxhBlock {
		for i := 0; i < xxhBlock/xxhStripe; i++ {
			accumulate(&acc, data[at+i*xxhStripe:], secret[8*i:])
		}
		for i := range acc {
			acc[i] = (acc[i] ^ acc[i]>>47 ^ u64(secret[128+8*i:])) * prime32x1
		}
	}
	rest := data[(n-1)/xxhBlock*xxhBlock:]
	for i := 0; i < (len(rest)-1)/xxhStripe; i++ {
		accumulate(&acc, rest[i*xxhStripe:], secret[8*i:])
	}
	accumulate(&acc, data[n-xxhStripe:], secret[121:])
	return uint128{
		merge(&acc, secret[11:], uint64(n)*prime64x1),
		merge(&acc, secret[117:], ^(uint64(n) * prime64x2)),
	}
}

func accumulate(acc *[8]uint64, stripe, secret []byte) {
	for i := 0; i < 8; i++ {
		value := u64(stripe[8*i:])
		keyed := value ^ u64(secret[8*i:])
		acc[i^1] += value
		acc[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32)
	}
}

func merge(acc *[8]uint64, secret []byte, start uint64) uint64 {
	for i := 0; i < 4; i++ {
		start += fold(acc[2*i]^u64(secret[16*i:]), acc[2*i+1]^u64(secret[16*i+8:]))
	}
	return avalanche(start)
}
