package kvstrata

import (
	"encoding/binary"
	"math/bits"
)

// BLAKE2b of RFC 7693, with the personalisation that its parameter block has room for (section 2.5 and the BLAKE2
// paper, section 2.8). The standard library has none.

var blake2bIV = [8]uint64{
	0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
	0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
}

var blake2bSigma = [10][16]byte{
	{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
	{14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
	{11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
	{7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
	{9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
	{2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
	{12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
	{13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
	{6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
	{10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
}

const blake2bBlock = 128

// blake2b returns size bytes of the digest of data under a key of up to 64 bytes and a personalisation of up to 16.
func blake2b(size int, key []byte, person string, data []byte) []byte {
	var parameters [64]byte
	parameters[0], parameters[1], parameters[2], parameters[3] = byte(size), byte(len(key)), 1, 1
	copy(parameters[48:], person)
	var h [8]uint64
	for i := range h {
		h[i] = blake2bIV[i] ^ binary.LittleEndian.Uint64(parameters[8*i:])
	}
	if len(key) > 0 {
		first := make([]byte, blake2bBlock, blake2bBlock+len(data))
		copy(first, key)
		data = append(first, data...)
	}
	done := uint64(0)
	for len(data) > blake2bBlock {
		done += blake2bBlock
		blake2bCompress(&h, data[:blake2bBlock], done, false)
		data = data[blake2bBlock:]
	}
	var last [blake2bBlock]byte
	copy(last[:], data)
	blake2bCompress(&h, last[:], done+uint64(len(data)), true)
	var out [64]byte
	for i, word := range h {
		binary.LittleEndian.PutUint64(out[8*i:], word)
	}
	return out[:size]
}

func blake2bCompress(h *[8]uint64, block []byte, count uint64, isLast bool) {
	var m, v [16]uint64
	for i := range m {
		m[i] = binary.LittleEndian.Uint64(block[8*i:])
	}
	copy(v[:8], h[:])
	copy(v[8:], blake2bIV[:])
	v[12] ^= count
	if isLast {
		v[14] = ^v[14]
	}
	mix := func(a, b, c, d int, x, y uint64) {
		v[a] += v[b] + x
		v[d] = bits.RotateLeft64(v[d]^v[a], -32)
		v[c] += v[d]
		v[b] = bits.RotateLeft64(v[b]^v[c], -24)
		v[a] += v[b] + y
		v[d] = bits.RotateLeft64(v[d]^v[a], -16)
		v[c] += v[d]
		v[b] = bits.RotateLeft64(v[b]^v[c], -63)
	}
	for round := 0; round < 12; round++ {
		s := &blake2bSigma[round%10]
		for i := 0; i < 4; i++ {
			mix(i, i+4, i+8, i+12, m[s[2*i]], m[s[2*i+1]])
		}
		for i := 0; i < 4; i++ {
			mix(i, (i+1)%4+4, (i+2)%4+8, (i+3)%4+12, m[s[8+2*i]], m[s[9+2*i]])
		}
	}
	for i := range h {
		h[i] ^= v[i] ^ v[i+8]
	}
}
