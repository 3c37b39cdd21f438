package kvstrata

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"os"
	"reflect"
	"strconv"
	"testing"
)

type vectors struct {
	Layouts []struct {
		Layout     Layout `json:"layout"`
		BlockBytes int    `json:"block_bytes"`
		LayoutID   string `json:"layout_id"`
		Variant    string `json:"variant"`
		VariantID  string `json:"variant_id"`
	} `json:"layouts"`
	Chains []struct {
		Secret      string   `json:"secret"`
		LayoutID    string   `json:"layout_id"`
		BlockTokens int      `json:"block_tokens"`
		Parent      string   `json:"parent"`
		Extras      []string `json:"extras"`
		Tokens      []uint32 `json:"tokens"`
		Keys        []string `json:"keys"`
	} `json:"chains"`
	Checksums []struct {
		BlockBytes int    `json:"block_bytes"`
		Digest     string `json:"digest"`
		Epoch      string `json:"epoch"`
		Stamp      string `json:"stamp"`
		Checksum   string `json:"checksum"`
	} `json:"checksums"`
	Frames []struct {
		Kind  string `json:"kind"`
		Frame string `json:"frame"`
	} `json:"frames"`
}

func read(t *testing.T) (found vectors) {
	t.Helper()
	text, err := os.ReadFile("../../../docs/protocol-vectors.json")
	if err == nil {
		err = json.Unmarshal(text, &found)
	}
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func unhex(t *testing.T, text string) []byte {
	t.Helper()
	value, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return value
}

func TestLayouts(t *testing.T) {
	for _, v := range read(t).Layouts {
		id := v.Layout.ID()
		if hex.EncodeToString(id) != v.LayoutID || v.Layout.BlockBytes() != v.BlockBytes {
			t.Errorf("layout %+v: id %x, %s wanted", v.Layout, id, v.LayoutID)
		}
		if varied := VariantID(id, v.Variant); hex.EncodeToString(varied) != v.VariantID {
			t.Errorf("variant %q: %x, %s wanted", v.Variant, varied, v.VariantID)
		}
	}
}

func TestChains(t *testing.T) {
	for _, v := range read(t).Chains {
		var extras [][]byte
		for _, extra := range v.Extras {
			extras = append(extras, unhex(t, extra))
		}
		keys := Keys(unhex(t, v.Secret), unhex(t, v.LayoutID), v.Tokens, v.BlockTokens, unhex(t, v.Parent), extras...)
		var made []string
		for _, key := range keys {
			made = append(made, hex.EncodeToString(key))
		}
		if !reflect.DeepEqual(made, v.Keys) {
			t.Errorf("keys %v, %v wanted", made, v.Keys)
		}
	}
}

func TestChecksums(t *testing.T) {
	for _, v := range read(t).Checksums {
		var block []byte
		for i := uint64(0); len(block) < v.BlockBytes; i++ {
			digest := sha256.Sum256(binary.LittleEndian.AppendUint64(nil, i))
			block = append(block, digest[:]...)
		}
		epoch, _ := strconv.ParseUint(v.Epoch, 10, 64)
		stamp, _ := strconv.ParseUint(v.Stamp, 10, 64)
		sum := Checksum(block[:v.BlockBytes], unhex(t, v.Digest), epoch, stamp)
		if hex.EncodeToString(sum[:]) != v.Checksum {
			t.Errorf("checksum of %d B: %x, %s wanted", v.BlockBytes, sum, v.Checksum)
		}
	}
}

func TestFramesOfTheAgentAreParsed(t *testing.T) {
	for _, v := range read(t).Frames {
		if v.Kind == "Attach" {
			continue // It has the only map, and no client gets it.
		}
		body := unhex(t, v.Frame)[4:]
		value, rest, err := parseValue(body)
		if err != nil || len(rest) != 0 || value.([]any)[0] != v.Kind {
			t.Fatalf("%s: %v, %d B left, %v", v.Kind, value, len(rest), err)
		}
		if again := appendValue(nil, value); !bytes.Equal(again, body) {
			t.Errorf("%s: %x, %x wanted", v.Kind, again, body)
		}
		for cut := range body {
			if _, _, err := parseValue(body[:cut]); err == nil {
				t.Errorf("%s: %d of %d B are parsed", v.Kind, cut, len(body))
			}
		}
	}
}

func TestAnAttachIsWrittenAsTheAgentReadsIt(t *testing.T) {
	found := read(t)
	for _, v := range found.Frames {
		if v.Kind == "Attach" {
			body := appendValue(nil, []any{"Attach", 2000, "token", "pool", found.Layouts[0].Layout.fields(), []any{"devices"}})
			if hex.EncodeToString(body) != v.Frame[8:] {
				t.Errorf("%x, %s wanted", body, v.Frame[8:])
			}
		}
	}
}
