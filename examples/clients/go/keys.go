package kvstrata

import (
	"encoding/binary"
	"strconv"
)

// Layout is the geometry and identity of one shard's KV, field by field as the protocol has it.
type Layout struct {
	Model        string `json:"model"`
	Revision     string `json:"revision"`
	Dtype        string `json:"dtype"`
	BlockTokens  int    `json:"block_tokens"`
	Layers       int    `json:"layers"`
	KvHeads      int    `json:"kv_heads"`
	HeadDim      int    `json:"head_dim"`
	ElementBytes int    `json:"element_bytes"`
	TpRank       int    `json:"tp_rank"`
	TpSize       int    `json:"tp_size"`
	RopeTheta    string `json:"rope_theta"`
	RopeScaling  string `json:"rope_scaling"`
	Quantization string `json:"quantization"`
	Adapter      string `json:"adapter"`
	Order        string `json:"order"`
	KvParts      int    `json:"kv_parts"`
}

func (l Layout) fields() fields {
	return fields{
		{"model", l.Model}, {"revision", l.Revision}, {"dtype", l.Dtype}, {"block_tokens", l.BlockTokens},
		{"layers", l.Layers}, {"kv_heads", l.KvHeads}, {"head_dim", l.HeadDim}, {"element_bytes", l.ElementBytes},
		{"tp_rank", l.TpRank}, {"tp_size", l.TpSize}, {"rope_theta", l.RopeTheta}, {"rope_scaling", l.RopeScaling},
		{"quantization", l.Quantization}, {"adapter", l.Adapter}, {"order", l.Order}, {"kv_parts", l.KvParts},
	}
}

// BlockBytes is the size of one block.
func (l Layout) BlockBytes() int {
	return l.Layers * l.KvParts * l.KvHeads * l.BlockTokens * l.HeadDim * l.ElementBytes
}

// ID digests every field, so that blocks of another layout have other keys.
func (l Layout) ID() []byte {
	var joined []byte
	for _, field := range l.fields() {
		if field.name == "kv_parts" && l.KvParts == 2 {
			continue
		}
		text, isText := field.value.(string)
		if !isText {
			text = strconv.Itoa(field.value.(int))
		}
		for _, part := range []string{field.name, text} {
			joined = append(binary.BigEndian.AppendUint32(joined, uint32(len(part))), part...)
		}
	}
	return blake2b(16, nil, "kvstrata.layout", joined)
}

// VariantID is the id of blocks that differ by what variant names, such as an adapter or a user's salt.
func VariantID(layoutID []byte, variant string) []byte {
	return blake2b(16, layoutID, "kvstrata.variant", []byte(variant))
}

// Keys are those of all full blocks of a prompt in the scope of a secret. parent is the key that the first one
// continues, empty for a root.
func Keys(secret, layoutID []byte, tokens []uint32, blockTokens int, parent []byte, extras ...[]byte) [][]byte {
	var tail []byte
	for _, extra := range extras {
		tail = append(binary.BigEndian.AppendUint32(tail, uint32(len(extra))), extra...)
	}
	keys := make([][]byte, 0, len(tokens)/blockTokens)
	for ; len(tokens) >= blockTokens; tokens = tokens[blockTokens:] {
		said := append(append([]byte(nil), layoutID...), byte(len(parent)))
		said = append(said, parent...)
		said = binary.BigEndian.AppendUint32(said, uint32(4*blockTokens))
		for _, token := range tokens[:blockTokens] {
			said = binary.LittleEndian.AppendUint32(said, token)
		}
		parent = blake2b(KeyBytes, secret, "kvstrata.block", append(said, tail...))
		keys = append(keys, parent)
	}
	return keys
}

// Checksum is that of a block's bytes in one use of one slot. A block has XXHSizeMin bytes or more.
func Checksum(block, key []byte, epoch, stamp uint64) [16]byte {
	use := binary.LittleEndian.AppendUint64(append([]byte(nil), key...), epoch)
	return xxh3of128(block, xxh3of64(binary.LittleEndian.AppendUint64(use, stamp)))
}
