// Package kvstrata is a client of kvstrata's wire protocol (docs/protocol.md) in Go, of the standard library alone.
//
// An agent that is away, late or refusing is a miss: every method says in its error why there is less than was asked
// for, and an engine may ignore it. What is returned has been verified. One caller at a time goes through a Client.
package kvstrata

import (
	"errors"
	"os"
	"strings"
	"sync"
	"time"
)

const (
	batchBlocks = 64
	firstWait   = 50 * time.Millisecond
	lastWait    = 5 * time.Second
)

// ErrAway says that there is no agent just now.
var ErrAway = errors.New("the agent is away")

// ErrLost says that leases or reservations were over before their work was done.
var ErrLost = errors.New("leases or reservations were over too soon")

// ErrCorrupt says that a block was not what its checksum says.
var ErrCorrupt = errors.New("a block differs from its checksum")

// Target is what a client attaches to.
type Target struct {
	Socket    string
	Pool      string
	TokenText string // The token itself; or
	TokenFile string // the file that it is read from at each attach; or neither, for an agent that goes by the user.
	Layout    Layout
	Name      string        // For the agent's log.
	Timeout   time.Duration // Of requests, beside what they wait for.
}

// Token is what is presented now.
func (t Target) Token() (string, error) {
	if t.TokenFile == "" {
		return t.TokenText, nil
	}
	text, err := os.ReadFile(t.TokenFile)
	return strings.TrimSpace(string(text)), err
}

// Client loads and stores blocks of prompts in the scope that its tenant writes to. It comes back by itself.
type Client struct {
	target    Target
	layoutID  []byte
	mutex     sync.Mutex
	attached  *connection
	nextTry   time.Time
	wait      time.Duration
	reason    error
	isClosing bool
}

// New makes a client, and tries to attach once; the error says why it is not attached, and it goes on trying.
func New(target Target) (*Client, error) {
	c := &Client{target: target, layoutID: target.Layout.ID(), wait: firstWait}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	_, err := c.ready()
	return c, err
}

// Close ends the connection, and with it all that is held.
func (c *Client) Close() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.isClosing = true
	c.drop(ErrAway)
}

// ready is an attached connection whose rights are up to date.
func (c *Client) ready() (*connection, error) {
	if c.attached == nil {
		if c.isClosing || time.Now().Before(c.nextTry) {
			return nil, errors.Join(ErrAway, c.reason)
		}
		made, err := connect(c.target)
		if err != nil {
			c.drop(err)
			return nil, err
		}
		c.attached, c.wait = made, firstWait
	}
	if err := c.settled(c.attached.refresh(c.target)); err != nil {
		return nil, err
	}
	return c.attached, nil
}

// settled gives the connection up where an error leaves it of no use.
func (c *Client) settled(err error) error {
	var failure *Failure
	if err != nil && (!errors.As(err, &failure) || failure.Code == "UnauthenticatedError") {
		c.drop(err)
	}
	return err
}

func (c *Client) drop(reason error) {
	if c.attached != nil {
		c.attached.close()
		c.attached = nil
	}
	c.reason, c.nextTry = reason, time.Now().Add(c.wait)
	c.wait = min(2*c.wait, lastWait)
}

func (c *Client) keys(at *connection, tokens []uint32) [][]byte {
	return Keys(at.secret, c.layoutID, tokens, c.target.Layout.BlockTokens, nil)
}

func joined(keys [][]byte) []byte {
	packed := make([]byte, 0, len(keys)*KeyBytes)
	for _, key := range keys {
		packed = append(packed, key...)
	}
	return packed
}

// Lookup counts the leading blocks that can be had. It leases nothing.
func (c *Client) Lookup(tokens []uint32, session string) (int, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	at, err := c.ready()
	if err != nil {
		return 0, err
	}
	return c.lookup(at, c.keys(at, tokens), session)
}

func (c *Client) lookup(from *connection, keys [][]byte, session string) (int, error) {
	blocks := 0
	for len(keys) > 0 {
		part := keys[:min(len(keys), KeysMax)]
		found, err := from.ask(c.target.Timeout, "Lookup", from.scope, joined(part), session, true)
		if err != nil {
			return blocks, c.settled(err)
		}
		leading := int(at[uint64](found, 2))
		blocks += leading
		if leading < len(part) {
			break
		}
		keys = keys[len(part):]
	}
	return blocks, nil
}

// Load reads the longest prefix of a prompt, each block verified; deadline bounds how long blocks are waited for.
func (c *Client) Load(tokens []uint32, deadline time.Duration) ([][]byte, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	at, err := c.ready()
	if err != nil {
		return nil, err
	}
	keys := c.keys(at, tokens)
	var blocks [][]byte
	for len(keys) > 0 {
		part := keys[:min(len(keys), batchBlocks)]
		leases, err := c.acquire(at, part, 30*time.Second, deadline)
		if err != nil || leases.Blocks() == 0 {
			return blocks, err
		}
		read, err := c.finish(leases)
		blocks = append(blocks, read...)
		if err != nil || len(read) < len(part) {
			return blocks, err
		}
		keys = keys[len(part):]
	}
	return blocks, nil
}

// Leases are the right to read leading blocks of a prompt, for a time.
type Leases struct {
	of     *connection
	keys   [][]byte
	ids    []any
	places [][2]uint64 // Extent and offset.
	sums   [][]byte
	uses   [][2]uint64 // Epoch and stamp.
}

// Blocks is how many were leased.
func (l *Leases) Blocks() int { return len(l.ids) }

// Acquire leases leading blocks of a prompt, which Finish reads and gives back.
func (c *Client) Acquire(tokens []uint32, lease, deadline time.Duration) (*Leases, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	at, err := c.ready()
	if err != nil {
		return &Leases{}, err
	}
	keys := c.keys(at, tokens)
	return c.acquire(at, keys[:min(len(keys), KeysMax)], lease, deadline)
}

func (c *Client) acquire(from *connection, keys [][]byte, lease, deadline time.Duration) (*Leases, error) {
	leases := &Leases{of: from, keys: keys}
	found, err := from.ask(
		c.target.Timeout+deadline, "Acquire", from.scope, joined(keys), "", lease.Seconds(), deadline.Seconds(),
	)
	if err != nil {
		return &Leases{}, c.settled(err)
	}
	epoch := at[uint64](found, 3)
	for _, item := range at[[]any](found, 1) {
		block := nested(item)
		place := [2]uint64{at[uint64](block, 1), at[uint64](block, 2)}
		_, err := from.slot(place[0], place[1], false)
		if err == nil && (len(at[[]byte](block, 4)) != checksumBytes || len(leases.ids) == len(keys)) {
			err = errMalformed
		}
		if err != nil {
			return &Leases{}, c.settled(err)
		}
		use := [2]uint64{epoch, at[uint64](block, 3)}
		if own := at[uint64](block, 6); own != 0 {
			use[0] = own
		}
		leases.ids = append(leases.ids, at[uint64](block, 0))
		leases.places = append(leases.places, place)
		leases.sums = append(leases.sums, at[[]byte](block, 4))
		leases.uses = append(leases.uses, use)
	}
	return leases, nil
}

// Finish copies what is leased, verifies the copies and ends the leases. Nothing counts that the agent does not confirm.
func (c *Client) Finish(leases *Leases) ([][]byte, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.finish(leases)
}

func (c *Client) finish(leases *Leases) ([][]byte, error) {
	if leases.Blocks() == 0 {
		return nil, nil
	}
	if c.attached != leases.of {
		return nil, ErrLost // They ended with their connection, and so did its memory.
	}
	var read [][]byte
	suspects, isLost := []any{}, false
	for i, place := range leases.places {
		slot, err := leases.of.slot(place[0], place[1], false)
		if err != nil { // The extent has gone, and the lease with it.
			isLost = true
			break
		}
		block := append([]byte(nil), slot...)
		if Checksum(block, leases.keys[i], leases.uses[i][0], leases.uses[i][1]) != [16]byte(leases.sums[i]) {
			suspects = append(suspects, leases.ids[i])
			break
		}
		read = append(read, block)
	}
	ended, err := leases.of.ask(c.target.Timeout, "Release", leases.ids, suspects)
	if err != nil {
		return nil, c.settled(err)
	}
	if isLost || at[uint64](ended, 1) < uint64(len(leases.ids)) {
		return nil, ErrLost
	}
	if len(suspects) > 0 {
		return read, ErrCorrupt
	}
	return read, nil
}

// Stored is what became of blocks.
type Stored struct {
	Published int // Available from now on.
	Existed   int // Were there already.
	Refused   int // There was no room, or no agent.
}

// Store makes blocks available from firstBlock on; block returns the bytes of each.
func (c *Client) Store(tokens []uint32, firstBlock int, block func(index int) []byte) (Stored, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	blocks := len(tokens) / c.target.Layout.BlockTokens
	stored := Stored{Refused: max(0, blocks-firstBlock)}
	at, err := c.ready()
	if err != nil {
		return stored, err
	}
	keys := c.keys(at, tokens)
	if firstBlock > 0 { // Nobody could find what stands behind a gap.
		if there, err := c.lookup(at, keys[:min(firstBlock, blocks)], ""); err != nil || there < firstBlock {
			return stored, err
		}
	}
	for first := firstBlock; first < blocks; first += batchBlocks {
		whole, err := c.storeBatch(at, keys, first, min(first+batchBlocks, blocks), block, &stored)
		if err != nil || !whole {
			return stored, err
		}
	}
	return stored, nil
}

// storeBatch stores blocks first to stop; false when there was no room for all of them.
func (c *Client) storeBatch(
	from *connection, keys [][]byte, first, stop int, block func(int) []byte, stored *Stored,
) (bool, error) {
	parent := []byte{}
	if first > 0 {
		parent = keys[first-1]
	}
	reserved, err := from.ask(c.target.Timeout, "Reserve", from.scope, parent, joined(keys[first:stop]))
	if err != nil {
		return false, c.settled(err)
	}
	epoch, slots := at[uint64](reserved, 3), at[[]any](reserved, 1)
	ids, sums := []any{}, []any{}
	if len(slots) > stop-first {
		return false, c.settled(errMalformed)
	}
	for i, item := range slots {
		slot := nested(item)
		if at[uint64](slot, 0) == 0 {
			stored.Existed++
			stored.Refused--
			continue
		}
		memory, err := from.slot(at[uint64](slot, 1), at[uint64](slot, 2), true)
		if err != nil {
			return false, c.settled(err)
		}
		bytes := block(first + i)
		sum := Checksum(bytes, keys[first+i], epoch, at[uint64](slot, 3))
		copy(memory, bytes)
		ids, sums = append(ids, at[uint64](slot, 0)), append(sums, sum[:])
	}
	if len(ids) == 0 {
		return len(slots) == stop-first, nil
	}
	published, err := from.ask(c.target.Timeout, "Publish", ids, sums)
	if err != nil {
		return false, c.settled(err)
	}
	whole := len(slots) == stop-first
	for _, result := range at[[]byte](published, 1) {
		switch result {
		case 1:
			stored.Published++
			stored.Refused--
		case 2:
			stored.Existed++
			stored.Refused--
		default:
			whole = false
		}
	}
	return whole, nil
}

// Pin keeps the leading blocks in memory for a time; the outcome is the agent's: accepted, partial, refused, expired or
// unknown, which it is as well while the agent is away.
func (c *Client) Pin(tokens []uint32, ttl time.Duration) (string, error) {
	return c.hint(tokens, func(from *connection, keys []byte) (answer, error) {
		return from.ask(c.target.Timeout, "Pin", from.scope, keys, ttl.Seconds())
	})
}

// Prefetch begins to bring the leading blocks that this node has into memory; see Pin.
func (c *Client) Prefetch(tokens []uint32, session string) (string, error) {
	return c.hint(tokens, func(from *connection, keys []byte) (answer, error) {
		return from.ask(c.target.Timeout, "Prefetch", from.scope, keys, session)
	})
}

// ToolWait says that a session waits for a tool, about so long; see Pin.
func (c *Client) ToolWait(session string, expected time.Duration) (string, error) {
	return c.hint(nil, func(from *connection, _ []byte) (answer, error) {
		return from.ask(c.target.Timeout, "TouchSession", session, "tool", uint64(0), expected.Seconds())
	})
}

// Fetch begins to bring the leading blocks into memory, also those that other nodes have; see Pin.
func (c *Client) Fetch(tokens []uint32, session string) (string, error) {
	return c.hint(tokens, func(from *connection, keys []byte) (answer, error) {
		return from.ask(c.target.Timeout, "Fetch", from.scope, keys, session)
	})
}

// Demote has the end of the prompt copied to a slower tier, and leave memory first; see Pin.
func (c *Client) Demote(tokens []uint32) (string, error) {
	return c.hint(tokens, func(from *connection, keys []byte) (answer, error) {
		return from.ask(c.target.Timeout, "Demote", from.scope, keys)
	})
}

// Retain says that an idle session comes back within a time; see Pin.
func (c *Client) Retain(session string, within time.Duration) (string, error) {
	return c.hint(nil, func(from *connection, _ []byte) (answer, error) {
		return from.ask(c.target.Timeout, "Retain", session, within.Seconds())
	})
}

// Complete says that a session is over, so that its blocks go to slow tiers; see Pin.
func (c *Client) Complete(session string) (string, error) {
	return c.hint(nil, func(from *connection, _ []byte) (answer, error) {
		return from.ask(c.target.Timeout, "CloseSession", session)
	})
}

// OpenSession starts a session, or revives one.
func (c *Client) OpenSession(session string) error {
	_, err := c.hint(nil, func(from *connection, _ []byte) (answer, error) {
		return from.ask(c.target.Timeout, "OpenSession", session)
	})
	return err
}

func (c *Client) hint(tokens []uint32, give func(*connection, []byte) (answer, error)) (string, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	from, err := c.ready()
	if err != nil {
		return "unknown", err
	}
	keys := c.keys(from, tokens)
	done, err := give(from, joined(keys[:min(len(keys), KeysMax)]))
	if err != nil {
		return "unknown", c.settled(err)
	}
	return at[string](done, 2), nil
}

// Reserve takes slots for a prompt's leading blocks and keeps them until the connection ends: for tests of that.
func (c *Client) Reserve(tokens []uint32) (int, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	from, err := c.ready()
	if err != nil {
		return 0, err
	}
	reserved, err := from.ask(c.target.Timeout, "Reserve", from.scope, []byte{}, joined(c.keys(from, tokens)))
	if err != nil {
		return 0, c.settled(err)
	}
	taken := 0
	for _, item := range at[[]any](reserved, 1) {
		if at[uint64](nested(item), 0) != 0 {
			taken++
		}
	}
	return taken, nil
}
