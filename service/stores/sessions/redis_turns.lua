-- Put after redis_common.lua before the scripts that know turn records. KEYS[6]: turns (hash: "t:<number>": a record as
-- JSON, the oldest has the lowest number; "q:<id>": request; "r:<id>": result), KEYS[7]: tail (list: the running turn's
-- chunks). A record: number, id, identity ('' for none), digest, base, status, cancel ('0' or '1'), expires
-- (microseconds as text: JSON numbers lose digits), bytes (of the result; while it runs, of the request and the chunks).
-- Each is a field of its own: a turn changes one record a few times, and its server writes down what is set.
local turns_key, tail_key = KEYS[6], KEYS[7]
local ABANDONED_US = 3600 * 1000000
local RUNNING_US = 2 * 86400 * 1000000 -- longer than any turn may take
local ROUND_US = 6 * 3600 * 1000000 -- of the keys' expiry

local changed = {} -- records that are to be written

-- Key layout 1 and 2 had all records in the field "index".
local function read_index(raw)
  local turns = cjson.decode(raw)
  for number, turn in ipairs(turns) do
    turn.number = number
    changed[turn] = true
  end
  return turns
end

local function read_fields()
  local numbers, names, turns = {}, {}, {}
  for _, field in ipairs(redis.call('HKEYS', turns_key)) do
    local number = string.match(field, '^t:(%d+)$')
    if number then numbers[#numbers + 1] = tonumber(number) end
  end
  table.sort(numbers)
  for position, number in ipairs(numbers) do names[position] = 't:' .. whole(number) end
  if #names == 0 then return turns end
  for position, raw in ipairs(redis.call('HMGET', turns_key, unpack(names))) do
    turns[position] = cjson.decode(raw)
    turns[position].number = numbers[position]
  end
  return turns
end

local function read_turns(now)
  local index, turns = redis.call('HGET', turns_key, 'index'), {}
  for _, turn in ipairs(index and read_index(index) or read_fields()) do
    if tonumber(turn.expires) > now then turns[#turns + 1] = turn end
  end
  return turns
end

-- Rounded up, and never back: the keys' expiry would be written down with each turn.
local function until_rounded(head, until_us)
  local turns_us = tonumber(head.turns_us)
  return turns_us < until_us and math.ceil(until_us / ROUND_US) * ROUND_US or turns_us
end

-- The changes of the head. `values`: further fields of the turns, each name followed by its value.
local function write_changes(head, turns, values)
  local bytes, until_us = 0, 0
  for _, turn in ipairs(turns) do
    bytes = bytes + turn.bytes
    until_us = math.max(until_us, tonumber(turn.expires))
    if changed[turn] then
      values[#values + 1] = 't:' .. whole(turn.number)
      values[#values + 1] = cjson.encode(turn)
    end
  end
  if #values > 0 then redis.call('HSET', turns_key, unpack(values)) end
  return {turn_bytes = whole(bytes), turns_us = until_us == 0 and '0' or whole(until_rounded(head, until_us))}
end

-- The same; also what read_turns left out, or is not in `turns` any more, is gone after this.
local function write_turns(head, turns, values)
  values = values or {}
  if #turns == 0 then
    redis.call('UNLINK', turns_key, tail_key)
    return write_changes(head, turns, values)
  end
  local fields, stale = {}, {}
  for _, turn in ipairs(turns) do
    fields['t:' .. whole(turn.number)], fields['r:' .. turn.id] = true, turn.bytes > 0
    if turn.status == 'running' then fields['q:' .. turn.id] = true end
  end
  for _, field in ipairs(redis.call('HKEYS', turns_key)) do
    if not fields[field] then stale[#stale + 1] = field end
  end
  if #stale > 0 then redis.call('HDEL', turns_key, unpack(stale)) end
  return write_changes(head, turns, values)
end

local function find_running(turns)
  for position, turn in ipairs(turns) do
    if turn.status == 'running' then return turn, position end
  end
end

-- `digest`: also one that ended in another way counts, if its digest is another.
local function find_repeatable(turns, identity, digest)
  for position = #turns, 1, -1 do
    local turn = turns[position]
    local is_repeatable = turn.status == 'running' or turn.status == 'committed' or digest and turn.digest ~= digest
    if identity ~= '' and turn.identity == identity and is_repeatable then
      return turn
    end
  end
end

-- `result` is nil for a turn that nobody came back for. Returns the values for write_turns.
local function close_turn(turn, status, result, expires_us)
  redis.call('UNLINK', tail_key)
  turn.status, turn.expires, turn.bytes = status, whole(expires_us), result and #result or 0
  changed[turn] = true
  return result and {'r:' .. turn.id, result} or {}
end

-- The newest record alone, which is the running turn's where one runs; of key layouts 1 and 2 all. Whether these are all.
local function read_newest(now)
  local newest
  for _, field in ipairs(redis.call('HKEYS', turns_key)) do
    if field == 'index' then return read_turns(now), true end
    local number = tonumber(string.match(field, '^t:(%d+)$'))
    if number and (not newest or number > newest) then newest = number end
  end
  if not newest then return {}, true end
  local turn = cjson.decode(redis.call('HGET', turns_key, 't:' .. whole(newest)))
  turn.number = newest
  return tonumber(turn.expires) > now and {turn} or {}, false
end

-- The same as write_turns, of a turn whose end changes nothing else. `had_bytes`: of the record before.
local function write_ended(head, turn, had_bytes, values)
  values[#values + 1] = 't:' .. whole(turn.number)
  values[#values + 1] = cjson.encode(turn)
  redis.call('HDEL', turns_key, 'q:' .. turn.id)
  redis.call('HSET', turns_key, unpack(values))
  return {
    turn_bytes = whole(head.turn_bytes + turn.bytes - had_bytes),
    turns_us = whole(until_rounded(head, tonumber(turn.expires))),
  }
end

-- The session moves on: by turn `id`, or by something else. Returns the changes of the head.
local function end_running(head, id, result, ttl_us)
  local now = clock_us()
  local turns, is_all = read_newest(now)
  local turn = find_running(turns)
  if not turn then return {} end
  local had_bytes, values = turn.bytes, nil
  if turn.id == id then
    values = close_turn(turn, 'committed', result, now + tonumber(ttl_us))
  else
    values = close_turn(turn, 'failed', nil, now + ABANDONED_US)
  end
  if is_all then return write_turns(head, turns, values) end
  return write_ended(head, turn, had_bytes, values)
end

-- The session was taken back to `from_version`: what turns made of it since then is deleted. Returns the changes of the
-- head, nil without any.
local function drop_results(head, from_version)
  local turns = read_turns(clock_us())
  for _, turn in ipairs(turns) do
    if tonumber(turn.base) >= from_version and turn.bytes > 0 then
      turn.status, turn.bytes = 'cancelled', 0
      changed[turn] = true
    end
  end
  return #turns > 0 and write_turns(head, turns) or nil
end

local function lease_left_us(head, now)
  if head.holder == '' then return 0 end
  return math.max(0, tonumber(head.lease_us) - now)
end

-- JSON, request, result, the rest of the lease, chunks.
local function show_turn(head, turn, now, first_chunk, is_brief)
  local shown = {
    'turn', cjson.encode(turn), not is_brief and redis.call('HGET', turns_key, 'q:' .. turn.id) or '',
    redis.call('HGET', turns_key, 'r:' .. turn.id) or '', whole(lease_left_us(head, now)),
  }
  if turn.status == 'running' then
    for _, chunk in ipairs(redis.call('LRANGE', tail_key, first_chunk, -1)) do shown[#shown + 1] = chunk end
  end
  return shown
end

-- A new record, or one that stands in its way: an answer for its caller, and the changes of the head. `base`: '' for the
-- head's; `model`: fingerprint of the one that is to run it; `ends_abandoned`: '1' or '0'.
local function begin_record(head, id, identity, digest, base, model, ends_abandoned, max_records, request)
  local now = clock_us()
  local turns = read_turns(now)
  local running = find_running(turns)
  -- The same id is this call again, after its answer was lost.
  local found = running and running.id == id and running or find_repeatable(turns, identity, digest)
  if found then return show_turn(head, found, now, 0), {} end
  if base ~= '' and base ~= head.version then return {'conflict'}, {} end
  if tonumber(head.num_log_tokens) > 0 and model ~= head.model_fingerprint then return {'other_model'}, {} end
  if running and ends_abandoned ~= '1' then return {'abandoned'}, {} end
  if running then close_turn(running, 'failed', nil, now + ABANDONED_US) end
  redis.call('UNLINK', tail_key)
  for position = #turns, 1, -1 do
    if turns[position].id == id then table.remove(turns, position) end
  end
  local number = #turns > 0 and turns[#turns].number + 1 or 1
  while #turns >= tonumber(max_records) do table.remove(turns, 1) end
  local turn = {
    number = number, id = id, identity = identity, digest = digest, base = head.version, status = 'running',
    cancel = '0', expires = whole(now + RUNNING_US), bytes = #request,
  }
  changed[turn] = true
  turns[#turns + 1] = turn
  return {'begun'}, write_turns(head, turns, {'q:' .. id, request})
end
